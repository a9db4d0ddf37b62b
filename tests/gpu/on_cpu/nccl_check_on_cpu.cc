// nccl_check as it is but for its sizes, on a CPU, with one rank: --no-speed. Its collectives do what they
// are told, and its graphs replay what was captured.
#include "gpu/on_cpu/train_kernels.h"

#include "gpu/on_cpu/nccl_on_cpu.h"

enum { cudaMemcpyDeviceToDevice = 100, cudaStreamCaptureModeThreadLocal };

// Nothing is timed here.
using cudaEvent_t = int*;
inline cudaError_t cudaEventCreate(cudaEvent_t*) { return cudaSuccess; }
inline cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventElapsedTime(float*, cudaEvent_t, cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }

#define HOLDFAST_ON_CPU
#include "gpu/nccl_check.cu"
