#include "holdfast/tensor_view.h"

#include <gtest/gtest.h>

#include <vector>

namespace holdfast {
namespace {

TEST(TensorView, SizesOfElements) {
  EXPECT_EQ(dtype_size(DType::kFloat64), 8);
  EXPECT_EQ(dtype_size(DType::kFloat32), 4);
  EXPECT_EQ(dtype_size(DType::kFloat16), 2);
  EXPECT_EQ(dtype_size(DType::kBFloat16), 2);
}

TEST(TensorView, OfVectorsHasTheirTypeAndLength) {
  const std::vector<float> floats(5);
  EXPECT_EQ(TensorView::of(floats).data, floats.data());
  EXPECT_EQ(TensorView::of(floats).dtype, DType::kFloat32);
  EXPECT_EQ(TensorView::of(floats).element_count, 5);
  const std::vector<double> doubles(7);
  EXPECT_EQ(TensorView::of(doubles).dtype, DType::kFloat64);
  EXPECT_EQ(TensorView::of(doubles).element_count, 7);
}

TEST(TensorView, AStridedViewCountsTheElementsItShows) {
  const float value = 0;
  const auto count = [&](const std::vector<std::int64_t>& shape) {
    const std::vector<std::int64_t> strides(shape.size(), 0);
    return TensorView::strided(&value, DType::kFloat32, shape, strides).element_count;
  };
  EXPECT_EQ(count({}), 1);
  EXPECT_EQ(count({64, 2}), 128);
  EXPECT_EQ(count({3, 0, 2}), 0);
  EXPECT_EQ(count({65536, 65537}), 65536ll * 65537ll);
}

TEST(TensorView, ASliceStepsByWholeElements) {
  const std::vector<char> memory(64);
  for (const DType dtype : {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    const TensorView slice = TensorView::contiguous(memory.data(), dtype, 8).slice(3, 4);
    EXPECT_EQ(slice.data, memory.data() + 3 * dtype_size(dtype));
    EXPECT_EQ(slice.element_count, 4);
    EXPECT_EQ(slice.dtype, dtype);
  }
  EXPECT_EQ(TensorView::contiguous(memory.data(), DType::kFloat64, 8).slice(8, 0).element_count, 0);
}

}  // namespace
}  // namespace holdfast
