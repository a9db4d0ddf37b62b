// Walks the steps of the kernel in ranks/cuda/scan_cuda.cu one after another on a CPU: the same tiles, groups
// of threads, lanes and folds, by the same functions. Shuffles are array accesses, and tiles are taken from
// the last to the first, since the kernel's may come in any order.
#pragma once

#include <algorithm>
#include <array>
#include <vector>

#include "cuda/scan_lanes.h"
#include "cuda/scan_plan.h"

namespace holdfast {

template <class Type>
class HostGroup {
 public:
  HostGroup() {
    for (std::size_t t = 0; t < threads_.size(); ++t) threads_[t].index = static_cast<int>(t);
  }
  template <class F>
  void each(F f) {
    for (auto& thread : threads_) f(thread);
  }
  void add_across(int distance) {
    add(distance, [](cuda::Thread<Type>& thread) { return thread.sums; });
  }
  void add_wide_across(int distance) {
    add(distance, [](cuda::Thread<Type>& thread) { return thread.wide; });
  }
  typename Type::Top top() {
    typename Type::Top top = 0;
    for (const auto& thread : threads_) top = Type::larger(top, thread.top);
    return top;
  }

 private:
  template <class Lanes>
  void add(int distance, Lanes lanes) {
    auto before = threads_;
    for (std::size_t t = 0; t < threads_.size(); ++t) {
      const auto* other = lanes(before[t ^ static_cast<std::size_t>(distance)]);
      for (int j = 0; j < cuda::Geometry<Type>::kPack; ++j) lanes(threads_[t])[j] += other[j];
    }
  }

  std::array<cuda::Thread<Type>, cuda::Geometry<Type>::kGroupThreads> threads_;
};

class HostLaunch {
 public:
  explicit HostLaunch(const cuda::ScanPlan& plan)
      : plan_(plan), results_(plan.results), sums_(static_cast<std::size_t>(plan.chunks)) {
    for (std::size_t tile = plan.tile_tensor.size(); tile-- > 0;) scan_tile(tile);
    for (std::size_t i = 0; i < plan.tensors.size(); ++i) {
      if (plan.tensors[i].tiles > 0) add_strands(plan.tensors[i], results_[i]);
    }
  }
  const std::vector<CudaProbe>& results() const { return results_; }

 private:
  void scan_tile(std::size_t tile) {
    const cuda::PlannedTensor& tensor = plan_.tensors[plan_.tile_tensor[tile]];
    CudaProbe& result = results_[plan_.tile_tensor[tile]];
    cuda::with_type(tensor.dtype, [&]<class Type, bool kComplex>() {
      scan<Type, kComplex>(tensor, static_cast<std::int64_t>(tile) - tensor.first_tile, result);
    });
  }

  template <class Type, bool kComplex>
  void scan(const cuda::PlannedTensor& tensor, std::int64_t tile, CudaProbe& result) {
    using G = cuda::Geometry<Type>;
    std::array<cuda::BlockResult, G::kGroups> blocks;
    for (int g = 0; g < G::kGroups; ++g) {
      const std::int64_t begin = tile * G::kTile + g * G::kBlock;
      const std::int64_t left = tensor.parts - begin;
      if (left <= 0) break;
      HostGroup<Type> group;
      const auto* data = static_cast<const typename G::Bits*>(tensor.data) + begin;
      blocks[static_cast<std::size_t>(g)] = cuda::scan_block<Type, kComplex>(
          group, data, static_cast<int>(std::min<std::int64_t>(left, G::kBlock)), tensor.aligned != 0,
          static_cast<std::uint64_t>(begin));
      group.each([&](const cuda::Thread<Type>& thread) { add(thread.findings, result); });
    }
    for (int c = 0; c < G::kChunks && tile * G::kChunks + c < tensor.chunks; ++c) {
      const cuda::BlockResult sum = cuda::add_blocks(blocks.data() + c * kBlocksPerChunk);
      sums_[static_cast<std::size_t>(tensor.first_chunk + tile * G::kChunks + c)] = sum.squares;
      result.abs_max = std::max(result.abs_max, sum.abs_max);
    }
  }

  static void add(const cuda::Findings& found, CudaProbe& result) {
    result.nan += found.nan;
    result.pos_inf += found.pos_inf;
    result.neg_inf += found.neg_inf;
    if (found.first < static_cast<std::uint64_t>(result.first_bad)) {  // -1 is the largest
      result.first_bad = static_cast<std::int64_t>(found.first);
    }
  }

  void add_strands(const cuda::PlannedTensor& tensor, CudaProbe& result) const {
    std::array<SumOfSquares, kStrands> strands;
    for (std::int64_t c = 0; c < tensor.chunks; ++c) {
      strands[static_cast<std::size_t>(c % kStrands)] +=
          sums_[static_cast<std::size_t>(tensor.first_chunk + c)];
    }
    for (std::size_t half = kStrands / 2; half > 0; half /= 2) {
      const auto before = strands;
      for (std::size_t s = 0; s < kStrands; ++s) strands[s] += before[s ^ half];
    }
    result.small = strands[0].small;
    result.medium = strands[0].medium;
    result.large = strands[0].large;
  }

  const cuda::ScanPlan& plan_;
  std::vector<CudaProbe> results_;
  std::vector<SumOfSquares> sums_;
};

}  // namespace holdfast
