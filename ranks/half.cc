// Compiled once for each instruction set: foreach_target.h includes this file again and again.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "half.cc"
#include "holdfast/half.h"

#include <algorithm>
#include <cassert>

#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace holdfast {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

// Where the processor rounds to fp16 itself, to nearest, ties to even.
constexpr bool kHasFp16 = HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL;

void narrow_fp16(const float* from, std::uint16_t* to, std::size_t count) {
  std::size_t i = 0;
  if constexpr (kHasFp16) {
    const hn::ScalableTag<float> wide;
    const hn::Rebind<hwy::float16_t, decltype(wide)> half;
    const hn::Rebind<std::uint16_t, decltype(wide)> bits;
    for (; i + hn::Lanes(wide) <= count; i += hn::Lanes(wide)) {
      hn::StoreU(hn::BitCast(bits, hn::DemoteTo(half, hn::LoadU(wide, from + i))), bits, to + i);
    }
  }
  for (; i < count; ++i) to[i] = to_fp16(from[i]);
}

void widen_fp16(const std::uint16_t* from, float* to, std::size_t count) {
  std::size_t i = 0;
  if constexpr (kHasFp16) {
    const hn::ScalableTag<float> wide;
    const hn::Rebind<hwy::float16_t, decltype(wide)> half;
    const hn::Rebind<std::uint16_t, decltype(wide)> bits;
    for (; i + hn::Lanes(wide) <= count; i += hn::Lanes(wide)) {
      hn::StoreU(hn::PromoteTo(wide, hn::BitCast(half, hn::LoadU(bits, from + i))), wide, to + i);
    }
  }
  for (; i < count; ++i) to[i] = from_fp16(from[i]);
}

// The compiler makes vectors of these two.
void narrow_bf16(const float* from, std::uint16_t* to, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) to[i] = to_bf16(from[i]);
}
void widen_bf16(const std::uint16_t* from, float* to, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) to[i] = from_bf16(from[i]);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace holdfast
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace holdfast {

HWY_EXPORT(narrow_fp16);
HWY_EXPORT(widen_fp16);
HWY_EXPORT(narrow_bf16);
HWY_EXPORT(widen_bf16);

void narrow(std::span<const float> from, DType dtype, std::span<std::uint16_t> to) {
  assert(dtype == DType::kFloat16 || dtype == DType::kBFloat16);
  if (dtype == DType::kFloat16) {
    HWY_DYNAMIC_DISPATCH(narrow_fp16)(from.data(), to.data(), from.size());
  } else {
    HWY_DYNAMIC_DISPATCH(narrow_bf16)(from.data(), to.data(), from.size());
  }
}

void widen(std::span<const std::uint16_t> from, DType dtype, std::span<float> to) {
  assert(dtype == DType::kFloat16 || dtype == DType::kBFloat16);
  if (dtype == DType::kFloat16) {
    HWY_DYNAMIC_DISPATCH(widen_fp16)(from.data(), to.data(), from.size());
  } else {
    HWY_DYNAMIC_DISPATCH(widen_bf16)(from.data(), to.data(), from.size());
  }
}

void add_halves(std::span<const std::uint16_t> from, DType dtype, std::span<std::uint16_t> to) {
  constexpr std::size_t kPiece = 1024;
  float a[kPiece];
  float b[kPiece];
  for (std::size_t begin = 0; begin < from.size(); begin += kPiece) {
    const std::size_t n = std::min(kPiece, from.size() - begin);
    widen(to.subspan(begin, n), dtype, {a, n});
    widen(from.subspan(begin, n), dtype, {b, n});
    for (std::size_t i = 0; i < n; ++i) a[i] += b[i];
    narrow({a, n}, dtype, to.subspan(begin, n));
  }
}

}  // namespace holdfast
#endif
