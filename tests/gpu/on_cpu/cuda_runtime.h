// As much of CUDA as the kernels and the scan's check need, on a CPU and without its toolkit: thread blocks
// run one after another in random order, the threads of one are fibers that meet at barriers and shuffles. It
// knows when a thread is not in the mask it names, when one waits for ever, and nothing of memory order or
// speed.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <vector>

#define __device__
#define __global__
#define __shared__ static
#define __launch_bounds__(...)

struct dim3 {
  unsigned x;
  explicit dim3(unsigned count) : x(count) {}
};

namespace on_cpu {

struct Fiber {
  ucontext_t context;
  unsigned thread = 0;
  bool done = false;
  std::vector<char> stack = std::vector<char>(64 << 10);
};

struct Meeting {
  int arrived = 0;
  long number = 0;
};

inline Fiber* running = nullptr;
inline ucontext_t scheduler;
inline std::function<void()> kernel;
inline dim3 block{0};
inline std::map<std::pair<unsigned, unsigned>, Meeting> meetings;  // by warp and mask
inline long arrivals = 0;
inline unsigned char values[1024][8];  // what each thread shows to others
inline unsigned block_size = 0;

inline dim3 thread() { return dim3(running->thread); }

[[noreturn]] inline void give_up(const char* why) {
  std::fprintf(stderr, "kernel on a CPU: thread %u of block %u %s\n", running->thread, block.x, why);
  std::exit(1);
}

inline void yield() { swapcontext(&running->context, &scheduler); }

inline void meet(unsigned warp, unsigned mask, unsigned count) {
  Meeting& meeting = meetings[{warp, mask}];
  const long number = meeting.number;
  ++arrivals;
  if (static_cast<unsigned>(++meeting.arrived) == count) {
    meeting = {0, number + 1};
    return;
  }
  while (meeting.number == number) yield();
}

// Shows `value` to the mask's threads and calls use(values), one array entry a lane.
template <class T, class Use>
auto exchange(unsigned mask, T value, Use use) {
  static_assert(sizeof(T) <= sizeof(values[0]));
  const unsigned warp = running->thread / 32;
  if ((mask >> running->thread % 32 & 1) == 0) give_up("is not in the mask it names");
  std::memcpy(values[running->thread], &value, sizeof(value));
  meet(warp, mask, static_cast<unsigned>(__builtin_popcount(mask)));
  T seen[32] = {};
  for (unsigned l = 0; l < 32; ++l) {
    if (mask >> l & 1) std::memcpy(&seen[l], values[32 * warp + l], sizeof(T));
  }
  const auto result = use(seen);
  meet(warp, mask, static_cast<unsigned>(__builtin_popcount(mask)));
  return result;
}

inline void enter() {
  kernel();
  running->done = true;
  yield();
}

inline void run_block(std::mt19937& random) {
  static std::vector<Fiber> fibers(1024);
  std::vector<unsigned> order(block_size);
  meetings.clear();
  for (unsigned t = 0; t < block_size; ++t) {
    Fiber& fiber = fibers[t];
    getcontext(&fiber.context);
    fiber.thread = order[t] = t;
    fiber.done = false;
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, enter, 0);
  }
  std::shuffle(order.begin(), order.end(), random);
  // A round in which nobody comes forward: somebody waits for a thread that has ended.
  for (int idle = 0, left = 1; left > 0;) {
    left = 0;
    const long before = arrivals;
    for (const unsigned t : order) {
      if (fibers[t].done) continue;
      running = &fibers[t];
      swapcontext(&scheduler, &running->context);
      left += fibers[t].done ? 0 : 1;
    }
    idle = arrivals == before ? idle + 1 : 0;
    if (left > 0 && idle > 2) give_up("waits for ever");
  }
}

}  // namespace on_cpu

#define threadIdx (::on_cpu::thread())
#define blockIdx (::on_cpu::block)

inline void __syncthreads() { on_cpu::meet(~0u, 0, on_cpu::block_size); }
inline void __threadfence() {}
inline void __threadfence_system() {}
inline void __syncwarp() { on_cpu::meet(on_cpu::running->thread / 32, ~0u, 32); }

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int distance) {
  const unsigned other = on_cpu::running->thread % 32 ^ static_cast<unsigned>(distance);
  if ((mask >> other & 1) == 0) on_cpu::give_up("reads from a thread that is not in the mask");
  return on_cpu::exchange(mask, value, [&](const T* seen) { return seen[other]; });
}
inline int __any_sync(unsigned mask, bool value) {
  return on_cpu::exchange(mask, value,
                          [](const bool* seen) { return std::count(seen, seen + 32, true) > 0; });
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned value) {
  return on_cpu::exchange(mask, value, [](const unsigned* seen) {
    unsigned sum = 0;
    for (int l = 0; l < 32; ++l) sum += seen[l];
    return sum;
  });
}

// One thread runs at a time.
template <class T>
T replace(T* p, T value) {
  const T old = *p;
  *p = value;
  return old;
}
using u64 = unsigned long long;
inline u64 atomicMax(u64* p, u64 value) { return replace(p, std::max(*p, value)); }
inline u64 atomicMin(u64* p, u64 value) { return replace(p, std::min(*p, value)); }
inline u64 atomicAdd(u64* p, u64 value) { return replace(p, *p + value); }
inline u64 atomicExch(u64* p, u64 value) { return replace(p, value); }
inline unsigned atomicExch(unsigned* p, unsigned value) { return replace(p, value); }
inline unsigned atomicOr(unsigned* p, unsigned value) { return replace(p, *p | value); }
inline unsigned atomicInc(unsigned* p, unsigned last) { return replace(p, *p >= last ? 0 : *p + 1); }
inline double __ldcg(const double* p) { return *p; }

// The host's side. Streams run at once, but when they are captured.
enum cudaError_t { cudaSuccess = 0, cudaErrorNotReady = 600 };
enum { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaStreamNonBlocking, cudaStreamCaptureModeGlobal };
using Work = std::vector<std::function<void()>>;
using cudaGraph_t = Work*;
using cudaGraphExec_t = Work*;
struct CUstream_st {
  Work captured;
  bool capturing = false;
};
using cudaStream_t = CUstream_st*;
struct cudaFuncAttributes {};
struct cudaDeviceProp {
  const char* name;
  int major, minor;
};

inline void submit(cudaStream_t stream, std::function<void()> work) {
  if (stream != nullptr && stream->capturing) {
    stream->captured.push_back(std::move(work));
  } else {
    work();
  }
}
inline const char* cudaGetErrorString(cudaError_t) { return ""; }
inline const char* cudaGetErrorName(cudaError_t) { return ""; }
inline cudaError_t cudaMalloc(void** p, std::size_t bytes) {
  *p = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  std::memset(*p, 0xa5, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMallocHost(void** p, std::size_t bytes) { return cudaMalloc(p, bytes); }
inline cudaError_t cudaFree(void* p) { return std::free(p), cudaSuccess; }
inline cudaError_t cudaFreeHost(void* p) { return cudaFree(p); }
inline cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, int) {
  return std::memcpy(to, from, bytes), cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, int, cudaStream_t stream) {
  return submit(stream, [=] { std::memcpy(to, from, bytes); }), cudaSuccess;
}
inline cudaError_t cudaMemset(void* p, int value, std::size_t bytes) {
  return std::memset(p, value, bytes), cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* p, int value, std::size_t bytes, cudaStream_t stream) {
  return submit(stream, [=] { std::memset(p, value, bytes); }), cudaSuccess;
}
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, const void*) { return cudaSuccess; }
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
// For programs that run all there are.
inline cudaError_t cudaGetDeviceCount(int* count) {
  const char* devices = std::getenv("HOLDFAST_ON_CPU_DEVICES");
  return *count = devices == nullptr ? 1 : std::atoi(devices), cudaSuccess;
}
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* device, int) {
  return *device = {"kernel on a CPU", 0, 0}, cudaSuccess;
}
inline cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  return *free = *total = 0, cudaSuccess;
}
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, int) {
  return *stream = new CUstream_st, cudaSuccess;
}
inline cudaError_t cudaStreamDestroy(cudaStream_t stream) { return delete stream, cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamBeginCapture(cudaStream_t stream, int) {
  return stream->capturing = true, cudaSuccess;
}
inline cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  stream->capturing = false;
  return *graph = &stream->captured, cudaSuccess;
}
inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t* replay, cudaGraph_t graph, int) {
  return *replay = graph, cudaSuccess;
}
inline cudaError_t cudaGraphLaunch(cudaGraphExec_t replay, cudaStream_t) {
  for (const auto& work : *replay) work();
  return cudaSuccess;
}
inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }
inline cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }

// The call of `kernel` with a copy of its arguments, which only the file that knows their type can make.
std::function<void()> bind_kernel(const void* kernel, void** arguments);

inline cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** arguments, std::size_t,
                                    cudaStream_t stream) {
  submit(stream, [=, call = bind_kernel(kernel, arguments)] {
    static std::mutex one_at_a_time;  // ranks may be threads
    const std::lock_guard lock(one_at_a_time);
    static std::mt19937 random(5);
    std::vector<unsigned> order(grid.x);
    for (unsigned b = 0; b < grid.x; ++b) order[b] = b;
    std::shuffle(order.begin(), order.end(), random);
    on_cpu::kernel = call;
    on_cpu::block_size = block.x;
    for (const unsigned b : order) {
      on_cpu::block = dim3(b);
      on_cpu::run_block(random);
    }
  });
  return cudaSuccess;
}
