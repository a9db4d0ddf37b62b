// A tensor as the guard sees it: memory, element type, shape.
#pragma once

#include <cstdint>
#include <span>

namespace holdfast {

enum class DType : int { kFloat64, kFloat32, kFloat16, kBFloat16 };

std::int64_t dtype_size(DType dtype);  // bytes
double dtype_largest(DType dtype);     // the largest finite value

// Does not own anything: the memory, and the arrays behind `shape` and `strides`, must outlive the call it is
// passed to.
struct TensorView {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
  // Contiguous, row-major, when `strides` is empty: then only the number of elements counts.
  std::int64_t element_count = 0;
  std::span<const std::int64_t> shape = {};
  std::span<const std::int64_t> strides = {};  // in elements; 0 repeats an element, negative walks back

  static TensorView contiguous(const void* data, DType dtype, std::int64_t element_count) {
    return {data, dtype, element_count, {}, {}};
  }
  static TensorView of(std::span<const float> values) {
    return contiguous(values.data(), DType::kFloat32, static_cast<std::int64_t>(values.size()));
  }
  static TensorView of(std::span<const double> values) {
    return contiguous(values.data(), DType::kFloat64, static_cast<std::int64_t>(values.size()));
  }
  // `shape` and `strides` have one entry a dimension, outermost first.
  static TensorView strided(const void* data, DType dtype, std::span<const std::int64_t> shape,
                            std::span<const std::int64_t> strides);

  // Elements [offset, offset + count) of a contiguous view.
  TensorView slice(std::int64_t offset, std::int64_t count) const;
};

}  // namespace holdfast
