// Compiled once for each instruction set: foreach_target.h includes this file again and again.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "scan_kernels.cc"
#include "scan_kernels.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "holdfast/float_bits.h"

// Vectors of a size known at compile time, so that they can be kept in arrays.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace holdfast {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

// acc + v * v, rounded once: bit for bit the same where the processor has no fused multiply-add.
template <class D, class V>
HWY_INLINE V add_square(D d, V acc, V v) {
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL || \
    (HWY_TARGET == HWY_NEON && HWY_ARCH_ARM_A64)
  static_cast<void>(d);
  return hn::MulAdd(v, v, acc);
#else
  using T = hn::TFromD<D>;
  HWY_ALIGN T a[hn::MaxLanes(D())];
  HWY_ALIGN T x[hn::MaxLanes(D())];
  hn::Store(acc, d, a);
  hn::Store(v, d, x);
  for (std::size_t i = 0; i < hn::MaxLanes(D()); ++i) a[i] = std::fma(x[i], x[i], a[i]);
  return hn::Load(d, a);
#endif
}

// The larger of `top` and |v|. Of no use once there was a NaN: add_square() tells.
template <class V>
HWY_INLINE V larger(V top, V v) {
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL
  constexpr int kLargestMagnitudeWithoutSign = 0b1011;
  if constexpr (sizeof(hn::TFromV<V>) == 4) {
    return V{_mm512_range_ps(top.raw, v.raw, kLargestMagnitudeWithoutSign)};
  } else {
    return V{_mm512_range_pd(top.raw, v.raw, kLargestMagnitudeWithoutSign)};
  }
#else
  return hn::Max(top, hn::Abs(v));
#endif
}

// Lanes, folded in halves down to one.
template <int kCount>
HWY_INLINE double fold(double* lanes) {
  for (int half = kCount / 2; half > 0; half /= 2) {
    for (int l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  }
  return lanes[0];
}

using D32 = hn::CappedTag<float, 16>;
using D64 = hn::CappedTag<double, 8>;

// What follows is one type for each dtype: how `Bits` in memory become a vector of the type that is summed.

struct Float64 {
  using Format = Float64Bits;
  using D = D64;
  static constexpr int kRow = kLanes64;
  static HWY_INLINE hn::VFromD<D> load(const std::uint64_t* p) {
    return hn::BitCast(D(), hn::LoadU(hn::RebindToUnsigned<D>(), p));
  }
};

struct Float32 {
  using Format = Float32Bits;
  using D = D32;
  static constexpr int kRow = kLanes;
  static HWY_INLINE hn::VFromD<D> load(const std::uint32_t* p) {
    return hn::BitCast(D(), hn::LoadU(hn::RebindToUnsigned<D>(), p));
  }
};

using HalfBits = hn::Rebind<std::uint16_t, D32>;
HWY_INLINE hn::VFromD<D32> promote_half(hn::VFromD<HalfBits> bits) {
  return hn::PromoteTo(D32(), hn::BitCast(hn::Rebind<hwy::float16_t, D32>(), bits));
}

struct Float16 {
  using Format = Float16Bits;
  static constexpr double kLargest = 65504;
  using D = D32;
  static constexpr int kRow = kLanes;
  static HWY_INLINE hn::VFromD<D> load(const std::uint16_t* p) {
    return promote_half(hn::LoadU(HalfBits(), p));
  }
};

struct BFloat16 {
  using Format = BFloat16Bits;
  using D = D32;
  static constexpr int kRow = kLanes;
  static HWY_INLINE hn::VFromD<D> load(const std::uint16_t* p) {
    return hn::PromoteTo(D(), hn::BitCast(hn::Rebind<hwy::bfloat16_t, D>(), hn::LoadU(HalfBits(), p)));
  }
};

// A bf16 is the upper half of an fp32, so that a vector of words gives two of fp32 with one operation each:
// the even elements, and the odd ones.
template <class Type>
constexpr bool kInPairs = std::is_same_v<Type, BFloat16>&& hn::MaxLanes(D32()) > 1;

struct Float8E5M2 {
  using Format = Float8E5M2Bits;
  static constexpr double kLargest = 57344;
  using D = D32;
  static constexpr int kRow = kLanes;
  static HWY_INLINE hn::VFromD<D> load(const std::uint8_t* p) {
    const auto bytes = hn::LoadU(hn::Rebind<std::uint8_t, D>(), p);
    return promote_half(hn::ShiftLeft<8>(hn::PromoteTo(HalfBits(), bytes)));
  }
};

struct Float8E4M3FN {
  using Format = Float8E4M3FNBits;
  static constexpr double kLargest = 448;
  using D = D32;
  static constexpr int kRow = kLanes;
  static HWY_INLINE hn::VFromD<D> load(const std::uint8_t* p) {
    const auto bytes = hn::PromoteTo(HalfBits(), hn::LoadU(hn::Rebind<std::uint8_t, D>(), p));
    const auto magnitude = hn::ShiftLeft<7>(hn::And(bytes, hn::Set(HalfBits(), std::uint16_t{0x7f})));
    return hn::Mul(promote_half(magnitude), hn::Set(D(), kE4M3FNScale));
  }
};

// The largest magnitudes of all blocks so far.
template <class Type>
struct Tops {
  using D = typename Type::D;
  static constexpr int kCount = std::min(4, Type::kRow / static_cast<int>(hn::MaxLanes(D())));

  hn::VFromD<D> tops[kCount];

  HWY_INLINE Tops() {
    for (auto& top : tops) top = hn::Zero(D());
  }
  HWY_INLINE double largest() const {
    auto top = tops[0];
    for (int a = 1; a < kCount; ++a) top = hn::Max(top, tops[a]);
    return static_cast<double>(hn::GetLane(hn::MaxOfLanes(D(), top)));
  }
};

// Adds up the rows of a block; kVectors vectors make a row.
template <class Type>
struct Rows {
  using D = typename Type::D;
  using V = hn::VFromD<D>;
  using Bits = typename Type::Format::Bits;
  static constexpr int kWidth = static_cast<int>(hn::MaxLanes(D()));
  static constexpr int kVectors = Type::kRow / kWidth;

  V sums[kVectors];
  Tops<Type> tops;

  HWY_INLINE explicit Rows(const Tops<Type>& so_far) : tops(so_far) {
    for (V& sum : sums) sum = hn::Zero(D());
  }

  HWY_INLINE void take(int a, V v) {
    sums[a] = add_square(D(), sums[a], v);
    V& top = tops.tops[a % Tops<Type>::kCount];
    top = larger(top, v);
  }

  HWY_INLINE void add(const Bits* row) {
    if constexpr (kInPairs<Type>) {
      // The even ones go to the first half of the vectors, the odd ones to the second.
      const hn::RebindToUnsigned<D> words;
      for (int a = 0; a < kVectors / 2; ++a) {
        const auto word = hn::BitCast(words, hn::LoadU(hn::Repartition<Bits, D>(), row + 2 * a * kWidth));
        take(a, hn::BitCast(D(), hn::ShiftLeft<16>(word)));
        take(a + kVectors / 2, hn::BitCast(D(), hn::And(word, hn::Set(words, 0xffff0000u))));
      }
    } else {
      for (int a = 0; a < kVectors; ++a) take(a, Type::load(row + a * kWidth));
    }
  }

  // The lanes folded in halves, twice as vectors.
  HWY_INLINE double sum() {
    constexpr int kFirst = kInPairs<Type> ? kVectors / 4 : kVectors / 2;
    HWY_ALIGN hn::TFromD<D> lanes[Type::kRow / 2];
    if constexpr (kInPairs<Type>) {
      // 32 lanes in pairs are left after the first time.
      for (int a = 0; a < kFirst; ++a) {
        const V even = hn::Add(sums[a], sums[a + kFirst]);
        const V odd = hn::Add(sums[a + kVectors / 2], sums[a + kVectors / 2 + kFirst]);
        hn::StoreInterleaved2(even, odd, D(), lanes + 2 * a * kWidth);
      }
      for (int l = 0; l < 16; ++l) lanes[l] += lanes[l + 16];
    } else {
      for (int a = 0; a < kFirst; ++a) sums[a] = hn::Add(sums[a], sums[a + kFirst]);
      for (int a = 0; a < kFirst / 2; ++a) {
        hn::Store(hn::Add(sums[a], sums[a + kFirst / 2]), D(), lanes + a * kWidth);
      }
    }
    double wide[8];
    for (int l = 0; l < 8; ++l) {
      wide[l] = static_cast<double>(lanes[l]);
      if constexpr (Type::kRow == kLanes) wide[l] += static_cast<double>(lanes[l + 8]);
    }
    return fold<8>(wide);
  }
};

// A page or two ahead, where the processor's own prefetchers do not go: without it the next page is waited
// for, since the additions leave less room to look ahead than a plain read has. Narrow types, on which more
// work is done for each cache line, gain more from the second-level cache.
template <class Bits>
HWY_INLINE void prefetch_row(const Bits* row) {
  constexpr bool kNarrow = sizeof(Bits) < 4;
  constexpr std::size_t kAhead = kNarrow ? 8192 : 4096;
  constexpr std::size_t kCacheLine = 64;
  constexpr std::size_t kRowBytes = sizeof(Bits) * (sizeof(Bits) == 8 ? kLanes64 : kLanes);
  const char* ahead = reinterpret_cast<const char*>(row) + kAhead;
  for (std::size_t at = 0; at < kRowBytes; at += kCacheLine)
    __builtin_prefetch(ahead + at, 0, kNarrow ? 2 : 3);
}

// At most kRows rows. The sum is not finite if an element is not, or if it overflows; zeros after the last
// element change nothing.
template <class Type>
HWY_INLINE double sum_block(const typename Type::Format::Bits* data, int count, Tops<Type>& tops) {
  Rows<Type> rows(tops);
  int i = 0;
  for (; i + Type::kRow <= count; i += Type::kRow) {
    prefetch_row(data + i);
    rows.add(data + i);
  }
  if (i < count) {
    typename Type::Format::Bits last[Type::kRow] = {};
    std::memcpy(last, data + i, static_cast<std::size_t>(count - i) * sizeof(last[0]));
    rows.add(last);
  }
  tops = rows.tops;
  return rows.sum();
}

template <class Type>
HWY_NOINLINE double sum_block_again(const typename Type::Format::Bits* data, int count, Tops<Type>& tops) {
  return sum_block<Type>(data, count, tops);
}

// One element as a double.
template <class Type>
HWY_INLINE double value_of(typename Type::Format::Bits bits) {
  if constexpr (std::is_same_v<Type, Float64>) {
    return std::bit_cast<double>(bits);
  } else if constexpr (std::is_same_v<Type, Float32>) {
    return static_cast<double>(std::bit_cast<float>(bits));
  } else {
    static_assert(std::is_same_v<Type, BFloat16>);
    return static_cast<double>(std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16));
  }
}

// In fp64, each element multiplied by `scale`; finite elements only. The squares of fp32 are exact.
template <class Type>
HWY_NOINLINE double sum_block_exactly(const typename Type::Format::Bits* data, int count, double scale) {
  double lanes[Type::kRow] = {};
  for (int begin = 0; begin < count; begin += Type::kRow) {
    const int n = std::min(Type::kRow, count - begin);
    for (int l = 0; l < n; ++l) {
      const double v = value_of<Type>(data[begin + l]) * scale;
      lanes[l] += v * v;
    }
  }
  return fold<Type::kRow>(lanes);
}

template <class Format>
HWY_INLINE void count_bad(typename Format::Bits bits, std::int64_t at, Probe& probe) {
  const FloatClass found = Format::classify(bits);
  if (found == FloatClass::kFinite) return;
  if (probe.first_bad < 0) probe.first_bad = at;
  if (found == FloatClass::kNan) ++probe.bad.nan;
  if (found == FloatClass::kPosInf) ++probe.bad.pos_inf;
  if (found == FloatClass::kNegInf) ++probe.bad.neg_inf;
}

// Counts what is not finite and puts zeros in its place.
template <class Type>
void clean(const typename Type::Format::Bits* data, int count, std::int64_t at, Probe& probe,
           typename Type::Format::Bits* out) {
  using Format = typename Type::Format;
  using Bits = typename Format::Bits;
  const hn::CappedTag<Bits, 64 / sizeof(Bits)> d;
  const hn::RebindToSigned<decltype(d)> ds;
  const int width = static_cast<int>(hn::Lanes(d));
  int i = 0;
  for (; i + width <= count; i += width) {
    const auto bits = hn::LoadU(d, data + i);
    const auto magnitude = hn::BitCast(ds, hn::And(bits, hn::Set(d, Format::kMagnitude)));
    const auto bad = hn::Gt(magnitude, hn::BitCast(ds, hn::Set(d, Format::kLargestFinite)));
    hn::StoreU(hn::IfThenZeroElse(hn::RebindMask(d, bad), bits), d, out + i);
    if (hn::AllFalse(ds, bad)) continue;
    const auto nan = hn::Gt(magnitude, hn::BitCast(ds, hn::Set(d, Format::kInfinity)));
    const auto negative = hn::Lt(hn::BitCast(ds, bits), hn::Zero(ds));
    const std::uint64_t all = hn::CountTrue(ds, bad);
    const std::uint64_t nans = hn::CountTrue(ds, nan);
    const std::uint64_t neg_infs = hn::CountTrue(ds, hn::AndNot(nan, hn::And(bad, negative)));
    if (probe.first_bad < 0) probe.first_bad = at + i + hn::FindFirstTrue(ds, bad);
    probe.bad.nan += nans;
    probe.bad.neg_inf += neg_infs;
    probe.bad.pos_inf += all - nans - neg_infs;
  }
  for (; i < count; ++i) {
    count_bad<Format>(data[i], at + i, probe);
    out[i] = Format::classify(data[i]) == FloatClass::kFinite ? data[i] : Bits{0};
  }
}

// The same for pairs, of which both parts are zeroed. `count` is of parts, `at` of elements.
template <class Type>
void clean_complex(const typename Type::Format::Bits* data, int count, std::int64_t at, Probe& probe,
                   typename Type::Format::Bits* out) {
  using Format = typename Type::Format;
  for (int i = 0; i < count; i += 2) {
    const FloatClass real = Format::classify(data[i]);
    const FloatClass imaginary = Format::classify(data[i + 1]);
    const bool finite = real == FloatClass::kFinite && imaginary == FloatClass::kFinite;
    out[i] = finite ? data[i] : 0;
    out[i + 1] = finite ? data[i + 1] : 0;
    if (finite) continue;
    const bool imaginary_says = real == FloatClass::kFinite || imaginary == FloatClass::kNan;
    count_bad<Format>(data[imaginary_says ? i + 1 : i], at + i / 2, probe);
  }
}

bool is_finite(double value) {
  return Float64Bits::classify(std::bit_cast<std::uint64_t>(value)) == FloatClass::kFinite;
}

// A block of finite elements, into what it is added to: again, and scaled or wider, where the sum of the
// squares as they are is out of range or near its lower end.
template <class Type>
void add_sum(const typename Type::Format::Bits* data, int count, double sum, SumOfSquares& squares) {
  if constexpr (std::is_same_v<Type, Float64>) {
    if (sum >= kLarge) {
      squares.large += sum_block_exactly<Type>(data, count, std::ldexp(1.0, -SumOfSquares::kScale));
      return;
    }
    if (sum < kSmall) {
      squares.small += sum_block_exactly<Type>(data, count, std::ldexp(1.0, SumOfSquares::kScale));
      return;
    }
  } else if constexpr (std::is_same_v<Type, Float32> || std::is_same_v<Type, BFloat16>) {
    if (!is_finite(sum) || sum < kTiny) {
      squares.medium += sum_block_exactly<Type>(data, count, 1.0);
      return;
    }
  }
  squares.medium += sum;
}

// Whether what is not finite in memory may have become a number when it was widened, larger than any finite
// one: in an E4M3FN always, which has no infinity, in types that go by way of fp16 where that is not widened
// by the processor.
template <class Type>
constexpr bool kBadMayBeNumbers = std::is_same_v<Type, Float8E4M3FN> ||
                                  ((std::is_same_v<Type, Float16> ||
                                    std::is_same_v<Type, Float8E5M2>)&&HWY_TARGET != HWY_AVX2 &&
                                   HWY_TARGET != HWY_AVX3 && HWY_TARGET != HWY_AVX3_DL);

// False when an element of the block is not finite, and when the sum overflowed.
template <class Type>
bool is_finite(double sum, const Tops<Type>& tops) {
  if constexpr (kBadMayBeNumbers<Type>) {
    if (tops.largest() > Type::kLargest) return false;
  }
  return is_finite(sum);
}

// `count` is of parts if kComplex.
template <class Type, bool kComplex>
Probe chunk(const void* memory, std::int64_t count) {
  using Bits = typename Type::Format::Bits;
  constexpr std::int64_t kBlock = Type::kRow * kRows;
  const Bits* data = static_cast<const Bits*>(memory);
  Probe probe;
  Tops<Type> tops;
  for (std::int64_t begin = 0; begin < count; begin += kBlock) {
    const Bits* p = data + begin;
    const int n = static_cast<int>(std::min(kBlock, count - begin));
    const Tops<Type> before = tops;
    double sum = sum_block<Type>(p, n, tops);
    Bits cleaned[kBlock];
    if (!is_finite<Type>(sum, tops)) {
      if constexpr (kComplex) {
        clean_complex<Type>(p, n, begin / 2, probe, cleaned);
      } else {
        clean<Type>(p, n, begin, probe, cleaned);
      }
      p = cleaned;
      tops = before;
      sum = sum_block_again<Type>(p, n, tops);
    }
    add_sum<Type>(p, n, sum, probe.squares);
  }
  probe.abs_max = tops.largest();
  probe.count = static_cast<std::uint64_t>(kComplex ? count / 2 : count);
  return probe;
}

Probe dispatch_chunk(DType dtype, const void* data, std::int64_t count) {
  switch (dtype) {
    case DType::kFloat64: return chunk<Float64, false>(data, count);
    case DType::kFloat32: return chunk<Float32, false>(data, count);
    case DType::kFloat16: return chunk<Float16, false>(data, count);
    case DType::kBFloat16: return chunk<BFloat16, false>(data, count);
    case DType::kFloat8E4M3FN: return chunk<Float8E4M3FN, false>(data, count);
    case DType::kFloat8E5M2: return chunk<Float8E5M2, false>(data, count);
    case DType::kComplex64: return chunk<Float32, true>(data, 2 * count);
    case DType::kComplex128: return chunk<Float64, true>(data, 2 * count);
    default: return {};
  }
}

void scale_values(float* values, std::int64_t count, float factor) {
  for (std::int64_t i = 0; i < count; ++i) values[i] *= factor;
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace holdfast
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace holdfast {

HWY_EXPORT(dispatch_chunk);
HWY_EXPORT(scale_values);

std::int64_t chunk_elements(DType dtype) {
  const bool wide = dtype == DType::kFloat64 || dtype == DType::kComplex128;
  const bool complex = dtype == DType::kComplex64 || dtype == DType::kComplex128;
  return (wide ? kLanes64 : kLanes) * kRows * kBlocksPerChunk / (complex ? 2 : 1);
}

Probe scan_chunk(DType dtype, const void* data, std::int64_t count) {
  return HWY_DYNAMIC_DISPATCH(dispatch_chunk)(dtype, data, count);
}

void scale(float* values, std::int64_t count, float factor) {
  HWY_DYNAMIC_DISPATCH(scale_values)(values, count, factor);
}

}  // namespace holdfast
#endif
