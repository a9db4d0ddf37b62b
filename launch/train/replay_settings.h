// What an experiment changes of a record: --set KEY=VALUE.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "holdfast/collectives/status.h"

namespace holdfast::train {

struct ReplaySettings {
  std::optional<std::string> precision;
  std::optional<double> loss_scale;
  std::optional<double> learning_rate;
  std::optional<double> eps;
  bool injected = true;  // faults that were put in are put in again
  bool natural_faults = true;
  std::vector<std::pair<int, std::int64_t>> repaired;  // records (micro-batch, index) replaced by zeros
};

// USAGE, naming what cannot be taken.
Status parse_replay_settings(const std::vector<std::string>& texts, ReplaySettings* out);
std::string replay_settings_help();

}  // namespace holdfast::train
