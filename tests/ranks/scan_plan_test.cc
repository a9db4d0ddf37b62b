// A list of tensors is cut into tiles that cover each element once.
#include <gtest/gtest.h>

#include <string>

#include "cuda/scan_plan.h"

namespace holdfast::cuda {
namespace {

// Never read.
const void* const kAddress = reinterpret_cast<const void*>(std::uintptr_t{1} << 40);

TensorView view(DType dtype, std::int64_t count) { return TensorView::contiguous(kAddress, dtype, count); }

ScanPlan plan_of(const std::vector<TensorView>& views) {
  ScanPlan plan;
  const Status status = plan_scan(views, &plan);
  EXPECT_TRUE(status.ok()) << status.message();
  return plan;
}

std::string refusal(const std::vector<TensorView>& views) {
  ScanPlan plan;
  const Status status = plan_scan(views, &plan);
  EXPECT_EQ(status.code(), StatusCode::kUsage);
  return status.message();
}

std::int64_t parts_each(DType dtype) {
  return dtype == DType::kComplex64 || dtype == DType::kComplex128 ? 2 : 1;
}

// Tiles and chunks follow each other without a gap, and hold the elements, the last one not empty.
void expect_covered(const ScanPlan& plan, const std::vector<TensorView>& views) {
  std::int64_t tile = 0;
  std::int64_t chunk = 0;
  ASSERT_EQ(plan.tensors.size(), views.size());
  for (std::size_t i = 0; i < views.size(); ++i) {
    const PlannedTensor& planned = plan.tensors[i];
    const DType dtype = views[i].dtype;
    EXPECT_EQ(planned.first_tile, tile) << i;
    EXPECT_EQ(planned.first_chunk, chunk) << i;
    EXPECT_EQ(planned.dtype, dtype) << i;
    for (std::uint32_t t = 0; t < planned.tiles; ++t) {
      ASSERT_EQ(plan.tile_tensor.at(static_cast<std::size_t>(tile + t)), i);
    }
    tile += planned.tiles;
    chunk += planned.chunks;
    if (is_always_finite(dtype)) {
      EXPECT_EQ(planned.tiles, 0u) << i;
      continue;
    }
    EXPECT_EQ(planned.parts, views[i].element_count * parts_each(dtype)) << i;
    const std::int64_t tile_size = kTileBytes / dtype_size(dtype);
    EXPECT_GE(planned.tiles * tile_size, views[i].element_count) << i;
    EXPECT_LT((planned.tiles - 1ll) * tile_size, views[i].element_count) << i;
    EXPECT_GE(planned.chunks * chunk_elements(dtype), views[i].element_count) << i;
    EXPECT_LT((planned.chunks - 1) * chunk_elements(dtype), views[i].element_count) << i;
  }
  EXPECT_EQ(plan.tile_tensor.size(), static_cast<std::size_t>(tile));
  EXPECT_EQ(plan.chunks, chunk);
}

TEST(ScanPlan, CoversEachElementOnceForEachDtypeAndSize) {
  std::vector<TensorView> views;
  for (int dtype = 0; dtype <= static_cast<int>(DType::kInt64); ++dtype) {
    const auto type = static_cast<DType>(dtype);
    const std::int64_t tile = kTileBytes / dtype_size(type);
    for (const std::int64_t count :
         {std::int64_t{0}, std::int64_t{1}, tile - 1, tile, tile + 1, 7 * tile + 3}) {
      views.push_back(view(type, count));
    }
  }
  expect_covered(plan_of(views), views);
}

TEST(ScanPlan, ATileIsAWholeNumberOfChunks) {
  for (const DType dtype : {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kFloat8E4M3FN,
                            DType::kComplex64, DType::kComplex128}) {
    EXPECT_EQ(kTileBytes % (chunk_elements(dtype) * dtype_size(dtype)), 0) << dtype_name(dtype);
  }
}

TEST(ScanPlan, CoversMoreThan32BitsOfElements) {
  const std::int64_t count = (std::int64_t{1} << 32) + 5;
  const std::vector<TensorView> views = {view(DType::kFloat8E5M2, count), view(DType::kFloat64, count),
                                         view(DType::kFloat32, 1)};
  const ScanPlan plan = plan_of(views);
  expect_covered(plan, views);
  EXPECT_EQ(plan.results[0].count, static_cast<std::uint64_t>(count));
}

TEST(ScanPlan, WhatIsNotReadHasItsResultFromTheBeginning) {
  const ScanPlan plan = plan_of({view(DType::kInt32, 7), view(DType::kFloat32, 0), view(DType::kFloat32, 3),
                                 TensorView::contiguous(nullptr, DType::kFloat16, 0)});
  EXPECT_EQ(plan.scanned, 1u);
  ASSERT_EQ(plan.results.size(), 4u);
  for (const CudaProbe& result : plan.results) {
    const Probe probe = to_probe(result);
    EXPECT_TRUE(probe.finite());
    EXPECT_EQ(probe.first_bad, -1);
    EXPECT_EQ(probe.abs_max, 0);
  }
  EXPECT_EQ(plan.results[0].count, 7u);
  EXPECT_EQ(plan.results[1].count, 0u);
}

TEST(ScanPlan, AnEmptyListIsNothingToDo) {
  const ScanPlan plan = plan_of({});
  EXPECT_EQ(plan.tile_tensor.size(), 0u);
  EXPECT_EQ(plan.scanned, 0u);
}

TEST(ScanPlan, KnowsWhichAddressesAreAligned) {
  const auto* base = static_cast<const char*>(kAddress);
  const ScanPlan plan = plan_of({TensorView::contiguous(base + 16, DType::kFloat32, 1),
                                 TensorView::contiguous(base + 4, DType::kFloat32, 1),
                                 TensorView::contiguous(base + 8, DType::kComplex128, 1)});
  EXPECT_EQ(plan.tensors[0].aligned, 1u);
  EXPECT_EQ(plan.tensors[1].aligned, 0u);
  EXPECT_EQ(plan.tensors[2].aligned, 0u);
}

TEST(ScanPlan, RefusesWhatItCannotScanAndSaysWhich) {
  const std::int64_t shape[] = {2, 2};
  const std::int64_t strides[] = {1, 2};
  const auto* base = static_cast<const char*>(kAddress);
  const TensorView good = view(DType::kFloat32, 1);
  EXPECT_NE(refusal({good, view(static_cast<DType>(99), 1)}).find("tensor 1"), std::string::npos);
  EXPECT_NE(refusal({TensorView::strided(kAddress, DType::kFloat32, shape, strides)}).find("strides"),
            std::string::npos);
  EXPECT_NE(refusal({TensorView::contiguous(nullptr, DType::kFloat32, 1)}).find("null"), std::string::npos);
  EXPECT_NE(refusal({view(DType::kFloat32, -1)}).find("negative"), std::string::npos);
  EXPECT_NE(refusal({TensorView::contiguous(base + 2, DType::kFloat32, 1)}).find("multiple of 4"),
            std::string::npos);
  EXPECT_NE(refusal({view(DType::kComplex128, std::int64_t{1} << 62)}).find("too large"), std::string::npos);
  const std::int64_t half = (std::int64_t{1} << 47) + 1;
  EXPECT_NE(refusal({view(DType::kFloat8E5M2, half), view(DType::kFloat8E5M2, half)}).find("2^48"),
            std::string::npos);
}

TEST(ScanPlan, ADeviceResultBecomesAProbeFieldByField) {
  const Probe probe = to_probe({1, 2, 3, 4, 5, 6, 7, 8, 9});
  EXPECT_EQ(probe.count, 1u);
  EXPECT_EQ(probe.bad, (BadCounts{2, 3, 4}));
  EXPECT_EQ(probe.first_bad, 5);
  EXPECT_EQ(probe.abs_max, 6);
  EXPECT_EQ(probe.squares, (SumOfSquares{7, 8, 9}));
}

}  // namespace
}  // namespace holdfast::cuda
