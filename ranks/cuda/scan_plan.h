// How a list of tensors is cut into tiles, one for each thread block of the kernel. Plain C++.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "holdfast/collectives/status.h"
#include "holdfast/scan_cuda.h"
#include "scan_kernels.h"

namespace holdfast::cuda {

// A tile is what kTileThreads threads read by kRows loads of kPackBytes each: for every dtype the same number
// of bytes, and a whole number of chunks.
inline constexpr int kTileThreads = 128;
inline constexpr int kPackBytes = 16;
inline constexpr std::int64_t kTileBytes = std::int64_t{kTileThreads} * kRows * kPackBytes;
inline constexpr std::int64_t kMostTiles = 0x7fffffff;  // a grid has no more blocks

// Complex elements are two parts each; other elements are one.
struct PlannedTensor {
  const void* data = nullptr;
  std::int64_t parts = 0;
  std::int64_t first_chunk = 0;  // among those of all tensors
  std::int64_t chunks = 0;
  std::uint32_t first_tile = 0;  // likewise
  std::uint32_t tiles = 0;       // 0: nothing to scan
  DType dtype = DType::kFloat32;
  std::uint32_t aligned = 0;  // whether `data` is a multiple of kPackBytes
};

struct ScanPlan {
  std::vector<PlannedTensor> tensors;
  std::vector<CudaProbe> results;          // before the first launch; final for what has no tiles
  std::vector<std::uint32_t> tile_tensor;  // for each tile, its tensor
  std::int64_t chunks = 0;
  std::uint32_t scanned = 0;  // tensors with tiles
};

// USAGE for what CudaScanPlan::create() refuses. Device memory is not touched.
Status plan_scan(std::span<const TensorView> tensors, ScanPlan* plan);

}  // namespace holdfast::cuda
