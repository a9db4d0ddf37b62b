// How a run ended on this rank.
#pragma once

#include "holdfast/collectives/status.h"

namespace holdfast::train {

struct Ending {
  Status status;
  bool agreed = true;  // false: other ranks may be gone, so leave with _exit and without MPI_Finalize
};

}  // namespace holdfast::train
