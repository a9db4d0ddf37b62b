// The scan of contiguous memory: one implementation for every SIMD instruction set, chosen at run time.
#pragma once

#include <cstdint>

#include "holdfast/scan.h"

namespace holdfast {

// How a tensor is cut up decides the bits of its sum of squares, so it is the same everywhere, GPU included.
// A block of kRows x kLanes elements is summed in fp32 (fp64 for fp64): element i of it belongs to lane i mod
// kLanes, a lane is summed in order, by fused multiply-adds, and the lanes are folded in halves, the first
// two times as they are and then in fp64. The blocks of a chunk are added up in order.
inline constexpr int kRows = 64;
inline constexpr int kLanes = 64;    // fp32 and narrower
inline constexpr int kLanes64 = 32;  // fp64
inline constexpr int kBlocksPerChunk = 8;

// Chunks are summed in this many strands, chunk c in strand c mod kStrands, which are then folded in halves.
inline constexpr int kStrands = 32;

// Blocks of fp32 and bf16 whose sum is below this, where single squares may have underflowed, or above all
// that is finite, are summed again in fp64. A block of zeros is, too: its sum is no less zero.
inline constexpr double kTiny = 0x1p-90;
// Blocks of fp64 whose sum is outside of these are summed scaled, see SumOfSquares. 2^63 blocks of the
// largest sum between them do not overflow.
inline constexpr double kSmall = 0x1p-900;
inline constexpr double kLarge = 0x1p+960;

// Elements, for a dtype that can be not finite.
std::int64_t chunk_elements(DType dtype);

// At most chunk_elements(dtype), contiguous. The floating-point environment must be the default one.
// `first_bad` is counted from the beginning of `data`.
Probe scan_chunk(DType dtype, const void* data, std::int64_t count);

// values[i] *= factor.
void scale(float* values, std::int64_t count, float factor);

}  // namespace holdfast
