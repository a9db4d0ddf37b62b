// A tensor as the guard sees it: memory, element type, shape.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace holdfast {

// Of 8-bit floating point there are the two types of the OCP 8-bit floating point specification; E4M3FN has
// no infinity. A complex element is two numbers, real part first.
enum class DType : int {
  kFloat64,
  kFloat32,
  kFloat16,
  kBFloat16,
  kFloat8E4M3FN,
  kFloat8E5M2,
  kComplex64,
  kComplex128,
  kBool,
  kUInt8,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
};

bool is_known(DType dtype);                // false for a number that is none of the above
std::string_view dtype_name(DType dtype);  // "float32", "bfloat16", ...; "unknown"
std::int64_t dtype_size(DType dtype);      // bytes of one element; 0 for an unknown type
double dtype_largest(DType dtype);   // the largest finite value, of a part if complex; 0 for other types
bool is_always_finite(DType dtype);  // integers and bool

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
