// A slow scan that shares nothing with the real one: it takes bit patterns apart by the definition of IEEE
// 754.
#pragma once

#include <gtest/gtest.h>

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "holdfast/scan.h"

namespace holdfast {

struct FloatFormat {
  const char* name;
  DType dtype;
  int bits;
  int fraction_bits;

  int exponent_bits() const { return bits - 1 - fraction_bits; }
  std::uint64_t fraction_mask() const { return (std::uint64_t{1} << fraction_bits) - 1; }
  std::uint64_t exponent_mask() const { return (std::uint64_t{1} << exponent_bits()) - 1; }
  std::uint64_t sign_bit() const { return std::uint64_t{1} << (bits - 1); }

  std::uint64_t infinity() const { return exponent_mask() << fraction_bits; }
  std::uint64_t quiet_nan() const { return infinity() | (std::uint64_t{1} << (fraction_bits - 1)); }
  std::uint64_t signalling_nan() const { return infinity() | 1; }
  std::uint64_t largest() const { return infinity() - 1; }
  std::uint64_t one() const { return (exponent_mask() >> 1) << fraction_bits; }
  std::uint64_t all_patterns_mask() const {
    return bits == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << bits) - 1;
  }

  bool is_finite(std::uint64_t pattern) const {
    return ((pattern >> fraction_bits) & exponent_mask()) != exponent_mask();
  }
  // Of a finite pattern; exact, since every format fits a double.
  double magnitude(std::uint64_t pattern) const {
    const auto exponent = static_cast<int>((pattern >> fraction_bits) & exponent_mask());
    const std::uint64_t fraction = pattern & fraction_mask();
    const int bias = static_cast<int>(exponent_mask() >> 1);
    if (exponent == 0) return std::ldexp(static_cast<double>(fraction), 1 - bias - fraction_bits);
    return std::ldexp(static_cast<double>(fraction | (std::uint64_t{1} << fraction_bits)),
                      exponent - bias - fraction_bits);
  }
};

inline const std::vector<FloatFormat>& formats() {
  static const std::vector<FloatFormat> all = {{"fp64", DType::kFloat64, 64, 52},
                                               {"fp32", DType::kFloat32, 32, 23},
                                               {"fp16", DType::kFloat16, 16, 10},
                                               {"bf16", DType::kBFloat16, 16, 7},
                                               {"fp8 e5m2", DType::kFloat8E5M2, 8, 2}};
  return all;
}

// Patterns as they lie in memory, in a block of exactly their size.
class Stored {
 public:
  Stored(const FloatFormat& format, const std::vector<std::uint64_t>& patterns)
      : width_(static_cast<std::size_t>(format.bits) / 8), bytes_(patterns.size() * width_) {
    for (std::size_t i = 0; i < patterns.size(); ++i) std::memcpy(&bytes_[i * width_], &patterns[i], width_);
  }
  // Address of element `i`.
  const void* at(std::size_t i) const { return bytes_.data() + i * width_; }

 private:
  const std::size_t width_;
  std::vector<unsigned char> bytes_;
};

struct Reference {
  BadCounts bad;
  std::int64_t first_bad = -1;
  double abs_max = 0;
  long double sum_of_squares =
      0;  // 64 bits of fraction and 15 of exponent: neither rounds nor overflows much
};

inline Reference reference_scan(const FloatFormat& format, const std::vector<std::uint64_t>& patterns) {
  Reference reference;
  for (std::size_t i = 0; i < patterns.size(); ++i) {
    const std::uint64_t pattern = patterns[i];
    if (format.is_finite(pattern)) {
      const double magnitude = format.magnitude(pattern);
      if (magnitude > reference.abs_max) reference.abs_max = magnitude;
      reference.sum_of_squares += static_cast<long double>(magnitude) * static_cast<long double>(magnitude);
      continue;
    }
    if (reference.first_bad < 0) reference.first_bad = static_cast<std::int64_t>(i);
    if ((pattern & format.fraction_mask()) != 0) {
      ++reference.bad.nan;
    } else if ((pattern & format.sign_bit()) != 0) {
      ++reference.bad.neg_inf;
    } else {
      ++reference.bad.pos_inf;
    }
  }
  return reference;
}

// Everything is exact but the sum of squares, which keeps to the bound that scan.h gives.
inline void expect_probe(const Probe& probe, const FloatFormat& format,
                         const std::vector<std::uint64_t>& patterns) {
  const Reference expected = reference_scan(format, patterns);
  EXPECT_EQ(probe.count, patterns.size());
  EXPECT_EQ(probe.bad.nan, expected.bad.nan);
  EXPECT_EQ(probe.bad.pos_inf, expected.bad.pos_inf);
  EXPECT_EQ(probe.bad.neg_inf, expected.bad.neg_inf);
  EXPECT_EQ(probe.first_bad, expected.first_bad);
  EXPECT_EQ(probe.finite(), expected.first_bad < 0);
  EXPECT_EQ(probe.abs_max, expected.abs_max);
  const long double bound = format.bits == 64 ? 0x1p-46L : 0x1p-17L;
  const auto root = static_cast<long double>(probe.squares.root());
  const long double expected_root = std::sqrt(expected.sum_of_squares);
  if (expected_root > DBL_MAX) {
    EXPECT_EQ(probe.squares.root(), static_cast<double>(INFINITY));
  } else {
    EXPECT_LE(std::fabs(root - expected_root), bound / 2 * expected_root + 0x1p-1074L)
        << root << " for " << expected_root;
  }
  if (expected.sum_of_squares > DBL_MAX) {
    EXPECT_EQ(probe.squares.value(), static_cast<double>(INFINITY));
    return;
  }
  const auto value = static_cast<long double>(probe.squares.value());
  EXPECT_LE(std::fabs(value - expected.sum_of_squares), bound * expected.sum_of_squares + 0x1p-1074L)
      << value << " for " << expected.sum_of_squares;
}

// Scans `patterns` as one contiguous tensor.
inline void expect_scan(const FloatFormat& format, const std::vector<std::uint64_t>& patterns) {
  SCOPED_TRACE(std::string(format.name) + ", " + std::to_string(patterns.size()) + " elements");
  const Stored stored(format, patterns);
  const auto count = static_cast<std::int64_t>(patterns.size());
  expect_probe(scan(TensorView::contiguous(stored.at(0), format.dtype, count)), format, patterns);
}

}  // namespace holdfast
