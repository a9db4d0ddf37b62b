// Compiled once for each instruction set: foreach_target.h includes this file again and again.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "read_kernels.cc"
#include "read_kernels.h"

#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace holdfast::bench {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

// Folds `count` elements into eight vectors, so that no addition waits for the one before.
template <class T, class Take>
HWY_INLINE hn::VFromD<hn::CappedTag<T, 16>> fold(const T* data, std::size_t count, Take take) {
  const hn::CappedTag<T, 16> d;
  hn::VFromD<decltype(d)> sums[8];
  for (auto& sum : sums) sum = hn::Zero(d);
  const std::size_t width = hn::Lanes(d);
  for (std::size_t i = 0; i < count; i += 8 * width) {
    for (std::size_t k = 0; k < 8; ++k) sums[k] = take(sums[k], hn::LoadU(d, data + i + k * width));
  }
  for (std::size_t k = 1; k < 8; ++k) sums[0] = hn::Add(sums[0], sums[k]);
  return sums[0];
}

struct Or {
  template <class V>
  HWY_INLINE V operator()(V a, V b) const {
    return hn::Or(a, b);
  }
};
struct AddSquare {
  template <class V>
  HWY_INLINE V operator()(V a, V b) const {
    return hn::MulAdd(b, b, a);
  }
};
struct Add {
  template <class V>
  HWY_INLINE V operator()(V a, V b) const {
    return hn::Add(a, b);
  }
};

std::uint32_t read_words(const std::uint32_t* words, std::size_t count) {
  const hn::CappedTag<std::uint32_t, 16> d;
  return hn::GetLane(hn::MaxOfLanes(d, fold(words, count, Or())));
}
float add_squares(const float* values, std::size_t count) {
  const hn::CappedTag<float, 16> d;
  return hn::GetLane(hn::SumOfLanes(d, fold(values, count, AddSquare())));
}
float add_values(const float* values, std::size_t count) {
  const hn::CappedTag<float, 16> d;
  return hn::GetLane(hn::SumOfLanes(d, fold(values, count, Add())));
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace holdfast::bench
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace holdfast::bench {

HWY_EXPORT(read_words);
HWY_EXPORT(add_squares);
HWY_EXPORT(add_values);

std::uint32_t read_all(const void* memory, std::size_t bytes) {
  return HWY_DYNAMIC_DISPATCH(read_words)(static_cast<const std::uint32_t*>(memory), bytes / 4);
}
float norm_alone(const float* values, std::size_t count) {
  return HWY_DYNAMIC_DISPATCH(add_squares)(values, count);
}
float sum_alone(const float* values, std::size_t count) {
  return HWY_DYNAMIC_DISPATCH(add_values)(values, count);
}

}  // namespace holdfast::bench
#endif
