// What an experiment changes of an attempt: --set KEY=VALUE. Samples of the batch are the library's, see
// Replay::run().
#pragma once

#include <optional>
#include <string>
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
};

// USAGE, naming what cannot be taken.
Status parse_replay_settings(const std::vector<std::string>& texts, ReplaySettings* out);
std::string replay_settings_help();

}  // namespace holdfast::train
