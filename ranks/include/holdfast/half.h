// 16-bit floating point, as bits.
#pragma once

#include <bit>
#include <cstdint>
#include <span>

#include "holdfast/tensor_view.h"

namespace holdfast {

// Rounding is to nearest, ties to even. Too large becomes infinite; a NaN stays a NaN of the same sign,
// quiet. Widening is exact, but that an fp16 NaN comes out quiet.

inline std::uint16_t to_bf16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & ~0x80000000u) > 0x7f800000u) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);  // quiet
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float from_bf16(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

inline std::uint16_t to_fp16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits & 0x80000000u) >> 16;
  const std::uint32_t magnitude = bits & ~0x80000000u;
  if (magnitude > 0x7f800000u)
    return static_cast<std::uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  if (magnitude >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);  // rounds to 65536 or more
  if (magnitude < 0x38800000u) {  // below 2^-14: fp16 subnormals, multiples of 2^-24
    if (magnitude < 0x33000000u) return static_cast<std::uint16_t>(sign);  // below 2^-25
    const std::uint32_t shift = 126 - (magnitude >> 23);                   // 14 to 24
    const std::uint32_t fraction = (magnitude & 0x7fffffu) | 0x800000u;
    const std::uint32_t kept = fraction >> shift;
    const std::uint32_t rest = fraction & ((1u << shift) - 1);
    const std::uint32_t half = 1u << (shift - 1);
    return static_cast<std::uint16_t>(sign |
                                      (kept + (rest > half || (rest == half && (kept & 1u)) ? 1u : 0u)));
  }
  const std::uint32_t rebiased = magnitude - 0x38000000u;
  return static_cast<std::uint16_t>(sign | ((rebiased + 0xfffu + ((rebiased >> 13) & 1u)) >> 13));
}

inline float from_fp16(std::uint16_t bits) {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
  const std::uint32_t magnitude = bits & 0x7fffu;
  if (magnitude < 0x400u) {
    const float value = static_cast<float>(magnitude) * 0x1p-24f;
    return sign != 0 ? -value : value;
  }
  if (magnitude > 0x7c00u)
    return std::bit_cast<float>(sign | 0x7f800000u | 0x400000u | ((magnitude & 0x3ffu) << 13));
  if (magnitude == 0x7c00u) return std::bit_cast<float>(sign | 0x7f800000u);
  return std::bit_cast<float>(sign | ((magnitude << 13) + 0x38000000u));
}

// Whole arrays of the same length; `dtype` is kFloat16 or kBFloat16. In the default floating-point
// environment.
void narrow(std::span<const float> from, DType dtype, std::span<std::uint16_t> to);
void widen(std::span<const std::uint16_t> from, DType dtype, std::span<float> to);

// to[i] = round(to[i] + from[i]), the sum of two 16-bit numbers being exact enough in fp32 to be rounded
// once.
void add_halves(std::span<const std::uint16_t> from, DType dtype, std::span<std::uint16_t> to);

}  // namespace holdfast
