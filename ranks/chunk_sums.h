// Puts the probes of a tensor's chunks together.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "scan_kernels.h"

namespace holdfast {

// What follows `whole` in the tensor, from element `at` on; but for the squares, which have an order of their
// own.
inline void append(Probe& whole, const Probe& part, std::int64_t at) {
  whole.count += part.count;
  whole.bad.nan += part.bad.nan;
  whole.bad.pos_inf += part.bad.pos_inf;
  whole.bad.neg_inf += part.bad.neg_inf;
  whole.abs_max = std::max(whole.abs_max, part.abs_max);
  if (part.first_bad >= 0 && (whole.first_bad < 0 || at + part.first_bad < whole.first_bad)) {
    whole.first_bad = at + part.first_bad;
  }
}

// The sums of squares of chunks, see kStrands.
using Strands = std::array<SumOfSquares, kStrands>;

inline SumOfSquares& strand_of(Strands& strands, std::int64_t chunk) {
  return strands[static_cast<std::size_t>(chunk % kStrands)];
}

inline SumOfSquares fold(Strands& strands) {
  for (std::size_t half = kStrands / 2; half > 0; half /= 2) {
    for (std::size_t s = 0; s < half; ++s) strands[s] += strands[s + half];
  }
  return strands[0];
}

}  // namespace holdfast
