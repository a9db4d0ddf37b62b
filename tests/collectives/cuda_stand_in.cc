#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>

#include "collectives/stand_in_world.h"
#include "holdfast/collectives/record.h"
#include "nccl_verdict.h"

using namespace holdfast::stand_in;
using holdfast::Record;

namespace {

cudaError_t allocate(void** out, std::size_t bytes, bool pinned, const char* function) {
  Lock lock(world().mutex);
  if (enter(lock, function)) return cudaErrorMemoryAllocation;
  auto* data = static_cast<std::byte*>(std::malloc(bytes));
  std::memset(data, 0xa5, bytes);
  world().memory[data] = {bytes, pinned};
  *out = data;
  return cudaSuccess;
}

cudaError_t deallocate(void* data, bool pinned, const char* function) {
  Lock lock(world().mutex);
  const auto fault = enter(lock, function);
  if (data == nullptr) return cudaSuccess;
  const auto found = world().memory.find(static_cast<std::byte*>(data));
  if (found == world().memory.end() || found->second.pinned != pinned) {
    complain(std::string(function) + " of what is not there");
  } else {
    std::free(found->first);
    world().memory.erase(found);
  }
  return fault ? cudaErrorUnknown : cudaSuccess;
}

}  // namespace

cudaError_t cudaSetDevice(int device) {
  current_device = device;
  Lock lock(world().mutex);
  return enter(lock, "cudaSetDevice") ? cudaErrorInvalidDevice : cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t) { return "an injected error"; }
const char* cudaGetErrorName(cudaError_t) { return "cudaErrorInjected"; }

cudaError_t cudaMalloc(void** data, std::size_t bytes) { return allocate(data, bytes, false, "cudaMalloc"); }
cudaError_t cudaFree(void* data) { return deallocate(data, false, "cudaFree"); }
cudaError_t cudaMallocHost(void** data, std::size_t bytes) {
  return allocate(data, bytes, true, "cudaMallocHost");
}
cudaError_t cudaFreeHost(void* data) { return deallocate(data, true, "cudaFreeHost"); }

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  Lock lock(world().mutex);
  if (enter(lock, "cudaStreamCreateWithFlags")) return cudaErrorUnknown;
  world().streams.push_back(std::make_unique<CUstream_st>());
  *stream = world().streams.back().get();
  (*stream)->device = current_device;
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  Lock lock(world().mutex);
  const auto fault = enter(lock, "cudaStreamDestroy");
  if (stream->destroyed) complain("cudaStreamDestroy twice");
  pump();
  stream->destroyed = true;
  stream->work.clear();
  return fault ? cudaErrorUnknown : cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  Lock lock(world().mutex);
  if (enter(lock, "cudaStreamQuery")) return cudaErrorUnknown;
  usable(stream, "cudaStreamQuery");
  pump();
  return stream->work.empty() ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  Lock lock(world().mutex);
  if (enter(lock, "cudaMemcpyAsync")) return cudaErrorUnknown;
  if (!usable(stream, "cudaMemcpyAsync")) return cudaErrorUnknown;
  const bool up = kind == cudaMemcpyHostToDevice;
  stream->work.emplace_back([=] {
    if (!inside(to, bytes, !up) || !inside(from, bytes, up)) {
      complain("cudaMemcpyAsync of memory that is not there, or not pinned");
    } else {
      std::memcpy(to, from, bytes);
    }
    return true;
  });
  return cudaSuccess;
}

namespace holdfast::cuda {

int prepare_publish() {
  Lock lock(world().mutex);
  return enter(lock, "prepare_publish") ? cudaErrorUnknown : cudaSuccess;
}

int launch_publish(const std::uint64_t* sum, std::uint64_t world_size, DeviceVerdict* verdict,
                   SumBoard* board, CUstream_st* stream) {
  Lock lock(world().mutex);
  if (enter(lock, "launch_publish")) return cudaErrorUnknown;
  if (!usable(stream, "launch_publish")) return cudaErrorUnknown;
  stream->work.emplace_back([=] {
    if (!inside(sum, sizeof(Record), false) || !inside(verdict, sizeof(*verdict), false) ||
        !inside(board, sizeof(*board), true)) {
      complain("a verdict in memory that is not there");
      return true;
    }
    bool refuses = std::atomic_ref(board->lost).load() != 0;
    for (std::size_t lane = 0; lane < Record::kLanes; ++lane) {
      std::atomic_ref(board->lanes[verdict->sums % SumBoard::kSlots][lane])
          .store(sum[lane], std::memory_order_relaxed);
      refuses = refuses || lane_refuses(lane, sum, world_size);
    }
    verdict->skip = refuses ? 1 : 0;
    ++verdict->sums;
    std::atomic_ref(board->sums).store(verdict->sums, std::memory_order_release);
    return true;
  });
  return cudaSuccess;
}

}  // namespace holdfast::cuda
