// The training loop of guarded_train.
#pragma once

#include <mpi.h>

#include "holdfast/collectives/collective.h"
#include "train/options.h"

namespace holdfast::train {

// How a run ended on this rank.
struct Ending {
  Status status;
  bool agreed = true;  // false: other ranks may be gone, so leave with _exit and without MPI_Finalize
};

// Trains as `options` say, over all ranks of `communicator`; `collective` covers the same ranks. Collective.
// `parsed` is what reading the command line gave on this rank. Prints to stdout and stderr, mostly on rank 0.
Ending train(const Options& options, const Status& parsed, MPI_Comm communicator, Collective& collective);

}  // namespace holdfast::train
