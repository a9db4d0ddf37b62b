// How a scan's results become lanes of a record: by the kernel, and by whoever walks its steps on a CPU.
#pragma once

#include <cstdint>

#include "holdfast/collectives/record.h"
#include "holdfast/scan_cuda.h"

#if defined(__CUDACC__)
#define HOLDFAST_RECORD_DEVICE __host__ __device__
#else
#define HOLDFAST_RECORD_DEVICE
#endif

namespace holdfast::cuda {

// A plan holds at most 2^48 bytes, so the sums cannot wrap.
struct LaneCounts {
  std::uint64_t by_class[kValueClassCount] = {};

  HOLDFAST_RECORD_DEVICE void add(const CudaProbe& probe) {
    by_class[static_cast<int>(ValueClass::kNan)] += probe.nan;
    by_class[static_cast<int>(ValueClass::kPosInf)] += probe.pos_inf;
    by_class[static_cast<int>(ValueClass::kNegInf)] += probe.neg_inf;
  }
};

// What Record::add_bad() and Record::mark_bad() do. What is found in the sum, or in the update made from it,
// no rank made by itself.
HOLDFAST_RECORD_DEVICE inline void add_to_lanes(const LaneCounts& counts, Stage stage, int rank,
                                                std::uint64_t* lanes) {
  constexpr std::uint64_t kMost = Record::kMaxPerRank;
  bool any = false;
  for (int c = 0; c < kValueClassCount; ++c) {
    const std::uint64_t count = counts.by_class[c] < kMost ? counts.by_class[c] : kMost;
    std::uint64_t& lane = lanes[static_cast<int>(stage) * kValueClassCount + c];
    lane = lane + count < kMost ? lane + count : kMost;
    any = any || count != 0;
  }
  if (!any || stage == Stage::kReduction || stage == Stage::kOptimizer) return;
  lanes[Record::kBadRanksLane] = 1;
  lanes[Record::kBadRankSumLane] = static_cast<std::uint64_t>(rank);
}

}  // namespace holdfast::cuda
