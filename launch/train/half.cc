#include "train/half.h"

#include <bit>
#include <cassert>

namespace holdfast::train {
namespace {

constexpr std::uint32_t kSign = 0x80000000u;
constexpr std::uint32_t kInfinity = 0x7f800000u;

template <typename Body>
void with_format(DType dtype, Body body) {
  assert(dtype == DType::kFloat16 || dtype == DType::kBFloat16);
  if (dtype == DType::kFloat16) {
    body([](float v) { return to_fp16(v); }, [](std::uint16_t b) { return from_fp16(b); });
  } else {
    body([](float v) { return to_bf16(v); }, [](std::uint16_t b) { return from_bf16(b); });
  }
}

}  // namespace

std::uint16_t to_bf16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & ~kSign) > kInfinity) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);  // quiet
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

float from_bf16(std::uint16_t bits) { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }

std::uint16_t to_fp16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits & kSign) >> 16;
  const std::uint32_t magnitude = bits & ~kSign;
  if (magnitude > kInfinity) return static_cast<std::uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
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

float from_fp16(std::uint16_t bits) {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
  const std::uint32_t magnitude = bits & 0x7fffu;
  if (magnitude < 0x400u) {
    const float value = static_cast<float>(magnitude) * 0x1p-24f;
    return sign != 0 ? -value : value;
  }
  if (magnitude >= 0x7c00u) return std::bit_cast<float>(sign | kInfinity | ((magnitude & 0x3ffu) << 13));
  return std::bit_cast<float>(sign | ((magnitude << 13) + 0x38000000u));
}

void narrow(std::span<const float> from, DType dtype, std::span<std::uint16_t> to) {
  with_format(dtype, [&](auto encode, auto) {
    for (std::size_t i = 0; i < from.size(); ++i) to[i] = encode(from[i]);
  });
}

void widen(std::span<const std::uint16_t> from, DType dtype, std::span<float> to) {
  with_format(dtype, [&](auto, auto decode) {
    for (std::size_t i = 0; i < from.size(); ++i) to[i] = decode(from[i]);
  });
}

void add(std::span<const std::uint16_t> from, DType dtype, std::span<std::uint16_t> to) {
  with_format(dtype, [&](auto encode, auto decode) {
    for (std::size_t i = 0; i < from.size(); ++i) to[i] = encode(decode(to[i]) + decode(from[i]));
  });
}

}  // namespace holdfast::train
