// A sum of squares that no finite value can overflow or underflow.
#pragma once

#include <cmath>

namespace holdfast {

// Squares of very small and of very large numbers are kept apart, scaled by a power of two (the three
// accumulators of J. L. Blue, "A portable Fortran program to find the Euclidean norm of a vector", 1978).
struct SumOfSquares {
  static constexpr int kScale = 600;

  double small = 0.0;   // of elements multiplied by 2^kScale
  double medium = 0.0;  // of elements as they are
  double large = 0.0;   // of elements divided by 2^kScale

  SumOfSquares& operator+=(const SumOfSquares& other) {
    small += other.small;
    medium += other.medium;
    large += other.large;
    return *this;
  }
  bool operator==(const SumOfSquares&) const = default;

  // +Inf, or 0, where the sum itself is out of a double's range.
  double value() const { return std::ldexp(small, -2 * kScale) + medium + std::ldexp(large, 2 * kScale); }

  // Its square root, the Euclidean norm: in range wherever the norm is.
  double root() const {
    if (large > 0) return std::ldexp(std::sqrt(large + std::ldexp(medium, -2 * kScale)), kScale);
    if (medium > 0) return std::sqrt(medium + std::ldexp(small, -2 * kScale));
    return std::ldexp(std::sqrt(small), -kScale);
  }
};

}  // namespace holdfast
