// guarded_train, from its options to its end.
#pragma once

#include <mpi.h>

#include <memory>

#include "holdfast/collectives/collective.h"
#include "train/ending.h"
#include "train/options.h"

namespace holdfast {
class StepGuard;
}

namespace holdfast::train {

struct Preparation;

// The guard that `options` ask for; none with --guard off. Collective.
Status make_guard(const Options& options, const Preparation& prepared, Collective& collective,
                  std::unique_ptr<StepGuard>* out);

// Trains as `options` say, over all ranks of `communicator`; `collective` covers the same ranks. Collective.
// `parsed` is what reading the command line gave on this rank. Prints to stdout and stderr, mostly on rank 0.
Ending train(const Options& options, const Status& parsed, MPI_Comm communicator, Collective& collective);

}  // namespace holdfast::train
