// An attempt that went wrong, made again from its bundle, in one process: guarded_train as a client of
// holdfast/replay.h.
#pragma once

#include "train/options.h"

namespace holdfast::train {

// Replays options.replay with options.replay_settings, looks for the fewest samples or tries one factor at a
// time when that is asked for, and prints what came of it. The exit code: see ReplayResult. Never updates
// weights. After MPI_Init, on one rank.
int replay(const Options& options);

}  // namespace holdfast::train
