// What hwloc and CUDA know of the place where this process runs.
#pragma once

#include "holdfast/collectives/topology.h"

namespace holdfast {

// basic_placement() with the CPUs this process is bound to and their NUMA nodes, from hwloc, and with the GPU
// of the CUDA context that is current on this thread, if any. The CUDA driver is looked for at run time;
// without it, or without a context, the GPU stays empty. Local.
RankPlacement detect_placement(int rank);

}  // namespace holdfast
