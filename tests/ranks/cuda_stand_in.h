// CudaRecord and CudaScanPlan beside collectives/nccl_stand_in.h, without kernels: what they would have done
// by the time the stream comes to it is done when it is asked for. What the kernels themselves compute is
// checked where they run, in tests/gpu.
#pragma once

namespace holdfast::stand_in {

// Of this thread's rank: the next launch of a scan is refused.
inline thread_local bool refuse_launch = false;

}  // namespace holdfast::stand_in
