// Memory to scan, and results as bits, for tests with and without a GPU.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "holdfast/scan.h"

namespace holdfast {

using Memory = std::vector<std::byte>;

inline const std::vector<DType>& float_dtypes() {
  static const std::vector<DType> all = {DType::kFloat64,   DType::kFloat32,      DType::kFloat16,
                                         DType::kBFloat16,  DType::kFloat8E4M3FN, DType::kFloat8E5M2,
                                         DType::kComplex64, DType::kComplex128};
  return all;
}

inline std::vector<std::uint64_t> bits_of(const Probe& probe) {
  return {probe.count,
          probe.bad.nan,
          probe.bad.pos_inf,
          probe.bad.neg_inf,
          static_cast<std::uint64_t>(probe.first_bad),
          std::bit_cast<std::uint64_t>(probe.abs_max),
          std::bit_cast<std::uint64_t>(probe.squares.small),
          std::bit_cast<std::uint64_t>(probe.squares.medium),
          std::bit_cast<std::uint64_t>(probe.squares.large)};
}

inline void put(Memory& memory, std::size_t at, std::uint64_t pattern, DType dtype, std::size_t width) {
  if (dtype == DType::kComplex64 || dtype == DType::kComplex128) width /= 2;
  std::memcpy(&memory[at * width], &pattern, width);
}

// Any patterns, or values near to each other, as those of a gradient are, times 2^exponent.
inline Memory random_memory(std::size_t bytes, DType dtype, std::mt19937_64& random, bool even,
                            int exponent = 0) {
  std::vector<std::uint64_t> words(bytes / 8 + 1);
  for (std::uint64_t& word : words) word = random();
  std::normal_distribution<double> normal;
  for (std::uint64_t& word : words) {
    if (!even) break;
    const double wide = std::ldexp(normal(random), exponent);
    const auto narrow = std::bit_cast<std::uint32_t>(static_cast<float>(wide));
    switch (dtype) {
      case DType::kFloat64:
      case DType::kComplex128: word = std::bit_cast<std::uint64_t>(wide); break;
      case DType::kFloat32:
      case DType::kComplex64:
        word = (std::uint64_t{narrow} << 32 | narrow) ^ (word & 0x007f00ff007f00ffu);
        break;
      case DType::kBFloat16:
        word = std::uint64_t{narrow >> 16} * 0x0001000100010001u ^ (word & 0x007f007f007f007fu);
        break;
      default: word &= 0xbfbfbfbfbfbfbfbfu;  // an exponent bit less: all finite
    }
  }
  Memory memory(bytes);
  std::memcpy(memory.data(), words.data(), bytes);
  return memory;
}

struct Bad {
  std::uint64_t nan, pos_inf, neg_inf, largest;
};

inline Bad patterns_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
    case DType::kComplex128:
      return {0x7ff0000000000001u, 0x7ff0000000000000u, 0xfff0000000000000u, 0x7fefffffffffffffu};
    case DType::kFloat32:
    case DType::kComplex64: return {0x7f800001u, 0x7f800000u, 0xff800000u, 0x7f7fffffu};
    case DType::kFloat16: return {0xfc01u, 0x7c00u, 0xfc00u, 0x7bffu};
    case DType::kBFloat16: return {0x7f81u, 0x7f80u, 0xff80u, 0xff7fu};
    case DType::kFloat8E5M2: return {0x7du, 0x7cu, 0xfcu, 0x7bu};
    default: return {0x7fu, 0xffu, 0x7fu, 0xfeu};
  }
}

}  // namespace holdfast
