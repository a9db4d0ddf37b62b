// Floating-point formats as bits, for processors and GPUs alike: whether a value is finite is read off its
// bits, so no compiler option and no floating-point mode can change the answer.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define HOLDFAST_HOST_DEVICE __host__ __device__
#else
#define HOLDFAST_HOST_DEVICE
#endif

namespace holdfast {

enum class FloatClass : int { kFinite, kNan, kPosInf, kNegInf };

// `kLargest` and `kInf` are magnitudes, that is bits without the sign: up to kLargest is finite, equal to
// kInf (where the format has one) is infinite, everything else is NaN.
template <typename UInt, UInt kLargest, UInt kInf>
struct FloatBits {
  using Bits = UInt;
  static constexpr Bits kMagnitude = static_cast<Bits>(static_cast<Bits>(~Bits{0}) >> 1);
  static constexpr Bits kLargestFinite = kLargest;
  static constexpr Bits kInfinity = kInf;

  HOLDFAST_HOST_DEVICE static constexpr FloatClass classify(Bits bits) {
    const Bits magnitude = static_cast<Bits>(bits & kMagnitude);
    if (magnitude <= kLargestFinite) return FloatClass::kFinite;
    if (magnitude != kInfinity) return FloatClass::kNan;
    return bits == magnitude ? FloatClass::kPosInf : FloatClass::kNegInf;
  }
};

struct Float64Bits : FloatBits<std::uint64_t, 0x7fefffffffffffffu, 0x7ff0000000000000u> {};
struct Float32Bits : FloatBits<std::uint32_t, 0x7f7fffffu, 0x7f800000u> {};
struct Float16Bits : FloatBits<std::uint16_t, 0x7bff, 0x7c00> {};
struct BFloat16Bits : FloatBits<std::uint16_t, 0x7f7f, 0x7f80> {};
struct Float8E5M2Bits : FloatBits<std::uint8_t, 0x7b, 0x7c> {};
struct Float8E4M3FNBits : FloatBits<std::uint8_t, 0x7e, 0x7e> {};  // no infinity

// Narrow formats are widened by way of fp16. An E5M2 is the upper half of one. An E4M3FN has a smaller
// exponent bias: its magnitude is that of this fp16 times 2^8, exactly, subnormals included.
HOLDFAST_HOST_DEVICE constexpr std::uint16_t e5m2_as_float16(std::uint8_t bits) {
  return static_cast<std::uint16_t>(bits << 8);
}
inline constexpr float kE4M3FNScale = 256.0f;
HOLDFAST_HOST_DEVICE constexpr std::uint16_t e4m3fn_magnitude_as_float16(std::uint8_t bits) {
  return static_cast<std::uint16_t>((bits & 0x7fu) << 7);
}

}  // namespace holdfast
