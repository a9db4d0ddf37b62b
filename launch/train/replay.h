// An attempt that went wrong, made again from its record, in one process.
#pragma once

#include <string>
#include <vector>

#include "train/options.h"

namespace holdfast::train {

enum class ReplayResult : int {
  kReproduced = 0,     // the same stage, tensor, index and classes
  kDifferent = 1,      // something else was not finite
  kNotReproduced = 2,  // everything was finite
  kNotReplayable = 3   // the record lacks what it takes, or is damaged
};

// Replays options.replay with options.replay_settings, prints what was found beside what was recorded, and
// keeps the experiment in the bundle's experiments.jsonl. Never updates weights. After MPI_Init, on one rank.
ReplayResult replay(const Options& options);

}  // namespace holdfast::train
