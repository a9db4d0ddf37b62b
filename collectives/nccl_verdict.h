// What follows the all-reduce of a record on its stream: the skip flag for the device, and the sum for the
// host. The rules are here for the kernel and for whoever walks its steps on a CPU.
#pragma once

#include <cstdint>

#include "holdfast/collectives/record.h"

#if defined(__CUDACC__)
#define HOLDFAST_HOST_DEVICE __host__ __device__
#else
#define HOLDFAST_HOST_DEVICE
#endif

struct CUstream_st;

namespace holdfast::cuda {

// In memory that host and device both reach. Counted rather than marked by an event: a graph that is replayed
// writes again and again what was captured once.
struct SumBoard {
  static constexpr std::uint64_t kSlots = 8;
  std::uint64_t lanes[kSlots][Record::kLanes];
  std::uint64_t sums;  // written so far, the latest to slot (sums - 1) % kSlots
  std::uint64_t lost;  // set by the host before it aborts: a sum may be half a sum
  std::uint32_t up;    // 1: what a skip flag is raised from
};

// In device memory.
struct DeviceVerdict {
  std::uint64_t sums;
  std::uint32_t skip;
};

// Whether this lane of a sum keeps the verdict from being clean. The sum is not clean when any does: judge(),
// lane by lane.
HOLDFAST_HOST_DEVICE inline bool lane_refuses(std::size_t lane, const std::uint64_t* sum,
                                              std::uint64_t world_size) {
  switch (lane) {
    case Record::kParticipantsLane: return sum[lane] != world_size;
    case Record::kPartsDoneLane: return sum[lane] > sum[Record::kParticipantsLane];
    case Record::kNoNextBatchLane:
    case Record::kBadRankSumLane: return false;
    default: return sum[lane] != 0;
  }
}

// A cudaError_t each; the header is without CUDA. The first loads the kernel, which a capture may not allow
// for.
int prepare_publish();
int launch_publish(const std::uint64_t* sum, std::uint64_t world_size, DeviceVerdict* verdict,
                   SumBoard* board, CUstream_st* stream);

}  // namespace holdfast::cuda
