// How sixteen bytes of each dtype become numbers: by the kernel, and by whoever walks its steps on a CPU.
#pragma once

#include <cmath>
#include <cstdint>

#include "holdfast/float_bits.h"
#include "holdfast/tensor_view.h"
#include "scan_kernels.h"

#if defined(__CUDACC__)
#include <cuda_fp16.h>
#define HOLDFAST_DEVICE __device__ __forceinline__
#else
#include <bit>
#define HOLDFAST_DEVICE inline
#endif

namespace holdfast::cuda {

struct alignas(16) Pack {
  std::uint32_t words[4];
};

#if defined(__CUDACC__)
HOLDFAST_DEVICE float as_float(std::uint32_t bits) { return __uint_as_float(bits); }
HOLDFAST_DEVICE double as_double(std::uint64_t bits) {
  return __longlong_as_double(static_cast<long long>(bits));
}
HOLDFAST_DEVICE std::uint64_t bits_of(double value) {
  return static_cast<std::uint64_t>(__double_as_longlong(value));
}
// acc + v * v, rounded once.
HOLDFAST_DEVICE float add_square(float acc, float v) { return __fmaf_rn(v, v, acc); }
HOLDFAST_DEVICE double add_square(double acc, double v) { return __fma_rn(v, v, acc); }
// The larger one of two pairs of 16 bits.
HOLDFAST_DEVICE std::uint32_t larger_pair(std::uint32_t a, std::uint32_t b) { return __vmaxu2(a, b); }
// Two fp16, sign and all.
HOLDFAST_DEVICE void widen_pair(std::uint32_t word, float& low, float& high) {
  const float2 wide = __half22float2(reinterpret_cast<const __half2&>(word));
  low = wide.x;
  high = wide.y;
}
#else
HOLDFAST_DEVICE float as_float(std::uint32_t bits) { return std::bit_cast<float>(bits); }
HOLDFAST_DEVICE double as_double(std::uint64_t bits) { return std::bit_cast<double>(bits); }
HOLDFAST_DEVICE std::uint64_t bits_of(double value) { return std::bit_cast<std::uint64_t>(value); }
HOLDFAST_DEVICE float add_square(float acc, float v) { return std::fma(v, v, acc); }
HOLDFAST_DEVICE double add_square(double acc, double v) { return std::fma(v, v, acc); }
HOLDFAST_DEVICE std::uint32_t larger_pair(std::uint32_t a, std::uint32_t b) {
  const std::uint32_t low = (a & 0xffffu) > (b & 0xffffu) ? a & 0xffffu : b & 0xffffu;
  const std::uint32_t high = (a >> 16) > (b >> 16) ? a >> 16 : b >> 16;
  return high << 16 | low;
}
// Right but for the sign, which a square does not have, and for what is not finite.
HOLDFAST_DEVICE void widen_pair(std::uint32_t word, float& low, float& high) {
  low = as_float((word & 0x7fffu) << 13) * 0x1p112f;
  high = as_float((word >> 16 & 0x7fffu) << 13) * 0x1p112f;
}
#endif

// What follows is one type for each dtype. take() adds the squares of a pack to its lanes, and keeps in `top`
// the largest magnitude, as bits: comparing them tells what is not finite, whatever the arithmetic made of
// it. largest() reads it back.

struct Float64 {
  using Format = Float64Bits;
  using Sum = double;
  using Top = std::uint64_t;
  static constexpr int kRow = kLanes64;
  static constexpr double kSumScale = 1;

  static HOLDFAST_DEVICE Top larger(Top a, Top b) { return a > b ? a : b; }
  static HOLDFAST_DEVICE std::uint64_t largest(Top top) { return top; }
  static HOLDFAST_DEVICE double value(std::uint64_t bits) { return as_double(bits); }

  static HOLDFAST_DEVICE void take(const Pack& pack, Top& top, Sum (&sums)[2]) {
    for (int j = 0; j < 2; ++j) {
      const std::uint64_t bits = std::uint64_t{pack.words[2 * j + 1]} << 32 | pack.words[2 * j];
      top = larger(top, bits & Format::kMagnitude);
      sums[j] = add_square(sums[j], as_double(bits));
    }
  }
};

struct Float32 {
  using Format = Float32Bits;
  using Sum = float;
  using Top = std::uint32_t;
  static constexpr int kRow = kLanes;
  static constexpr double kSumScale = 1;

  static HOLDFAST_DEVICE Top larger(Top a, Top b) { return a > b ? a : b; }
  static HOLDFAST_DEVICE std::uint32_t largest(Top top) { return top; }
  static HOLDFAST_DEVICE double value(std::uint32_t bits) { return as_float(bits); }

  static HOLDFAST_DEVICE void take(const Pack& pack, Top& top, Sum (&sums)[4]) {
    for (int j = 0; j < 4; ++j) {
      top = larger(top, pack.words[j] & Format::kMagnitude);
      sums[j] = add_square(sums[j], as_float(pack.words[j]));
    }
  }
};

// The tops of narrower types are two magnitudes of 16 bits.
struct Narrow {
  using Sum = float;
  using Top = std::uint32_t;
  static constexpr int kRow = kLanes;
  static constexpr double kSumScale = 1;

  static HOLDFAST_DEVICE Top larger(Top a, Top b) { return larger_pair(a, b); }
  static HOLDFAST_DEVICE std::uint32_t larger_half(Top top) {
    return (top & 0xffffu) > (top >> 16) ? top & 0xffffu : top >> 16;
  }
  static HOLDFAST_DEVICE void take_halves(std::uint32_t word, Sum& low, Sum& high) {
    float values[2];
    widen_pair(word, values[0], values[1]);
    low = add_square(low, values[0]);
    high = add_square(high, values[1]);
  }
};

struct Float16 : Narrow {
  using Format = Float16Bits;

  static HOLDFAST_DEVICE std::uint16_t largest(Top top) {
    return static_cast<std::uint16_t>(larger_half(top));
  }
  static HOLDFAST_DEVICE double value(std::uint16_t magnitude) {
    float low, high;
    widen_pair(magnitude, low, high);
    return low;
  }

  static HOLDFAST_DEVICE void take(const Pack& pack, Top& top, Sum (&sums)[8]) {
    for (int w = 0; w < 4; ++w) {
      top = larger(top, pack.words[w] & 0x7fff7fffu);
      take_halves(pack.words[w], sums[2 * w], sums[2 * w + 1]);
    }
  }
};

struct BFloat16 : Narrow {
  using Format = BFloat16Bits;

  static HOLDFAST_DEVICE std::uint16_t largest(Top top) {
    return static_cast<std::uint16_t>(larger_half(top));
  }
  static HOLDFAST_DEVICE double value(std::uint16_t bits) { return as_float(std::uint32_t{bits} << 16); }

  static HOLDFAST_DEVICE void take(const Pack& pack, Top& top, Sum (&sums)[8]) {
    for (int w = 0; w < 4; ++w) {
      top = larger(top, pack.words[w] & 0x7fff7fffu);
      sums[2 * w] = add_square(sums[2 * w], as_float(pack.words[w] << 16));
      sums[2 * w + 1] = add_square(sums[2 * w + 1], as_float(pack.words[w] & 0xffff0000u));
    }
  }
};

// Four bytes become two words with the magnitudes of two fp16 each: of bytes 0 and 2, and of 1 and 3.
struct Float8E5M2 : Narrow {
  using Format = Float8E5M2Bits;

  static HOLDFAST_DEVICE std::uint8_t largest(Top top) {
    return static_cast<std::uint8_t>(larger_half(top) >> 8);
  }
  static HOLDFAST_DEVICE double value(std::uint8_t magnitude) {
    return Float16::value(e5m2_as_float16(magnitude));
  }

  static HOLDFAST_DEVICE void take(const Pack& pack, Top& top, Sum (&sums)[16]) {
    for (int w = 0; w < 4; ++w) {
      const std::uint32_t even = pack.words[w] << 8 & 0x7f007f00u;
      const std::uint32_t odd = pack.words[w] & 0x7f007f00u;
      top = larger(larger(top, even), odd);
      take_halves(even, sums[4 * w], sums[4 * w + 2]);
      take_halves(odd, sums[4 * w + 1], sums[4 * w + 3]);
    }
  }
};

// Summed without the factor that e4m3fn_magnitude_as_float16() wants: it is a power of two, nothing is near
// the ends of fp32's range, and so it may as well be the sum that is multiplied.
struct Float8E4M3FN : Narrow {
  using Format = Float8E4M3FNBits;
  static constexpr double kSumScale = double{kE4M3FNScale} * double{kE4M3FNScale};

  static HOLDFAST_DEVICE std::uint8_t largest(Top top) {
    return static_cast<std::uint8_t>(larger_half(top) >> 7);
  }
  static HOLDFAST_DEVICE double value(std::uint8_t magnitude) {
    return Float16::value(e4m3fn_magnitude_as_float16(magnitude)) * double{kE4M3FNScale};
  }

  static HOLDFAST_DEVICE void take(const Pack& pack, Top& top, Sum (&sums)[16]) {
    for (int w = 0; w < 4; ++w) {
      const std::uint32_t even = (pack.words[w] & 0x007f007fu) << 7;
      const std::uint32_t odd = pack.words[w] >> 1 & 0x3f803f80u;
      top = larger(larger(top, even), odd);
      take_halves(even, sums[4 * w], sums[4 * w + 2]);
      take_halves(odd, sums[4 * w + 1], sums[4 * w + 3]);
    }
  }
};

// Calls `visitor.template operator()<Type, kComplex>()` for a dtype that can be not finite.
template <class Visitor>
HOLDFAST_DEVICE void with_type(DType dtype, Visitor&& visitor) {
  switch (dtype) {
    case DType::kFloat64: return visitor.template operator()<Float64, false>();
    case DType::kFloat32: return visitor.template operator()<Float32, false>();
    case DType::kFloat16: return visitor.template operator()<Float16, false>();
    case DType::kBFloat16: return visitor.template operator()<BFloat16, false>();
    case DType::kFloat8E4M3FN: return visitor.template operator()<Float8E4M3FN, false>();
    case DType::kFloat8E5M2: return visitor.template operator()<Float8E5M2, false>();
    case DType::kComplex64: return visitor.template operator()<Float32, true>();
    case DType::kComplex128: return visitor.template operator()<Float64, true>();
    default: return;
  }
}

}  // namespace holdfast::cuda
