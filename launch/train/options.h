// The command line of guarded_train.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "holdfast/checkpoint/checkpoint_store.h"
#include "holdfast/collectives/status.h"
#include "holdfast/tensor_view.h"
#include "train/optimizer.h"
#include "train/progress.h"
#include "train/schedule.h"

namespace holdfast::train {

struct Options {
  std::string workload = "fashion-mnist";
  std::vector<std::string> data;  // empty until parsed: the workload's default
  std::uint64_t steps = 600;      // attempts
  std::int64_t batch = 32;        // samples a rank and micro-batch
  int accumulate = 1;             // micro-batches an attempt
  std::uint64_t seed = 1;
  std::string precision = "fp32";  // in which gradients are held and reduced
  std::string loss_scaling = "auto";
  bool local_denominator = false;
  OptimizerOptions optimizer;
  Schedule schedule;
  double clip = 5.0;  // global gradient norm; 0 turns clipping off
  float ema_decay = 0.99f;
  int expected_ranks = 0;                // 0 takes any number
  std::vector<std::string> uneven_data;  // unparsed RANK=ATTEMPTS
  std::string policy_file;
  std::string run_dir;
  bool resume = false;
  CheckpointOptions checkpoints{.interval_attempts = 100, .keep = 3, .keep_every = 0, .quota_bytes = 0};
  std::optional<int> metrics_port;
  std::string metrics_address = "127.0.0.1";
  bool guard = true;
  std::string replay;                          // a bundle; "": train
  std::vector<std::string> replay_settings;    // unparsed --set
  bool shrink = false;                         // with replay: look for the fewest samples
  bool one_factor = false;                     // with replay: try one at a time
  std::vector<std::string> faults;             // unparsed --inject
  std::vector<std::string> natural_faults;     // unparsed --fault
  std::vector<std::uint64_t> omitted_updates;  // attempts
  bool print_digests = false;
  bool print_rates = false;
  bool print_timing = false;
  std::int64_t evaluate = -1;  // test samples at the end; -1 for all
  Progress::Mode progress = Progress::Mode::kAuto;

  DType dtype() const;  // of the precision
  bool scales_loss() const;

  // For how many attempts this rank has batches; 0 for as many as are asked for.
  std::uint64_t data_ends(int rank) const;
};

// Fills `options`. When `help` is not empty afterwards it is to be printed and nothing to be done. USAGE,
// with the option named, for anything that cannot be taken.
Status parse_options(int argc, const char* const* argv, Options* options, std::string* help);

}  // namespace holdfast::train
