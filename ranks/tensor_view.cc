#include "holdfast/tensor_view.h"

#include <bit>
#include <cassert>

#include "holdfast/float_bits.h"

namespace holdfast {

bool is_known(DType dtype) { return dtype >= DType::kFloat64 && dtype <= DType::kInt64; }

std::string_view dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kFloat64: return "float64";
    case DType::kFloat32: return "float32";
    case DType::kFloat16: return "float16";
    case DType::kBFloat16: return "bfloat16";
    case DType::kFloat8E4M3FN: return "float8_e4m3fn";
    case DType::kFloat8E5M2: return "float8_e5m2";
    case DType::kComplex64: return "complex64";
    case DType::kComplex128: return "complex128";
    case DType::kBool: return "bool";
    case DType::kUInt8: return "uint8";
    case DType::kInt8: return "int8";
    case DType::kInt16: return "int16";
    case DType::kInt32: return "int32";
    case DType::kInt64: return "int64";
  }
  return "unknown";
}

std::int64_t dtype_size(DType dtype) {
  switch (dtype) {
    case DType::kComplex128: return 16;
    case DType::kFloat64:
    case DType::kComplex64:
    case DType::kInt64: return 8;
    case DType::kFloat32:
    case DType::kInt32: return 4;
    case DType::kFloat16:
    case DType::kBFloat16:
    case DType::kInt16: return 2;
    case DType::kFloat8E4M3FN:
    case DType::kFloat8E5M2:
    case DType::kBool:
    case DType::kUInt8:
    case DType::kInt8: return 1;
  }
  return 0;
}

double dtype_largest(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
    case DType::kComplex128: return std::bit_cast<double>(Float64Bits::kLargestFinite);
    case DType::kFloat32:
    case DType::kComplex64: return static_cast<double>(std::bit_cast<float>(Float32Bits::kLargestFinite));
    case DType::kFloat16: return 65504;
    case DType::kBFloat16:
      return static_cast<double>(std::bit_cast<float>(std::uint32_t{BFloat16Bits::kLargestFinite} << 16));
    case DType::kFloat8E4M3FN: return 448;
    case DType::kFloat8E5M2: return 57344;
    default: return 0;
  }
}

bool is_always_finite(DType dtype) { return dtype >= DType::kBool && is_known(dtype); }

TensorView TensorView::strided(const void* data, DType dtype, std::span<const std::int64_t> shape,
                               std::span<const std::int64_t> strides) {
  assert(shape.size() == strides.size());
  std::int64_t count = 1;
  for (const std::int64_t extent : shape) count *= extent;
  return {data, dtype, count, shape, strides};
}

TensorView TensorView::slice(std::int64_t offset, std::int64_t count) const {
  assert(shape.empty() && offset >= 0 && count >= 0 && offset + count <= element_count);
  return contiguous(static_cast<const char*>(data) + offset * dtype_size(dtype), dtype, count);
}

}  // namespace holdfast
