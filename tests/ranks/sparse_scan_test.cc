// A sparse gradient is judged by what the optimizer makes of it.
#include "holdfast/sparse_scan.h"

#include <gtest/gtest.h>

#include <limits>
#include <map>
#include <random>
#include <vector>

#include "holdfast/half.h"

namespace holdfast {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

SparseView view_of(const std::vector<std::int64_t>& rows, const std::vector<float>& values) {
  return {rows, TensorView::of(values),
          rows.empty() ? 0 : static_cast<std::int64_t>(values.size() / rows.size())};
}

Probe scanned(const SparseView& view) {
  Probe probe;
  const Status status = scan_sparse(view, &probe);
  EXPECT_TRUE(status.ok()) << status.to_string();
  return probe;
}

TEST(SparseScan, RowsThatComeTwiceAreAddedUpFirst) {
  const std::vector<std::int64_t> rows = {7, 2, 7};
  const Probe probe = scanned(view_of(rows, {1, 2, 10, 20, 3, 4}));
  EXPECT_TRUE(probe.finite());
  EXPECT_EQ(probe.count, 4u);
  EXPECT_EQ(probe.abs_max, 20);
  EXPECT_EQ(probe.squares.value(), 16 + 36 + 100 + 400);
}

TEST(SparseScan, TwoFiniteRowsCanMakeAnInfinity) {
  const std::vector<std::int64_t> rows = {5, 5};
  EXPECT_EQ(scanned(view_of(rows, {3e38f, 1, 3e38f, 1})).bad, (BadCounts{0, 1, 0}));
  const std::vector<std::uint16_t> halves = {to_fp16(40000), to_fp16(40000)};
  EXPECT_EQ(scanned({rows, TensorView::contiguous(halves.data(), DType::kFloat16, 2), 1}).first_bad, 5);
  const std::vector<std::uint16_t> wider = {to_bf16(40000), to_bf16(40000)};
  EXPECT_TRUE(scanned({rows, TensorView::contiguous(wider.data(), DType::kBFloat16, 2), 1}).finite());
}

TEST(SparseScan, OppositeInfinitiesAreOneNan) {
  const std::vector<std::int64_t> rows = {1, 0, 1};
  const Probe probe = scanned(view_of(rows, {kInf, 1, -kInf}));
  EXPECT_EQ(probe.bad, (BadCounts{1, 0, 0}));
  EXPECT_EQ(probe.first_bad, 1);
}

TEST(SparseScan, TheLowestBadElementOfTheDenseTensorIsNamed) {
  const std::vector<std::int64_t> rows = {9, 4, 6};
  std::vector<float> values(9, 1.0f);
  values[1] = kInf;   // row 9
  values[8] = -kInf;  // row 6
  const Probe probe = scanned(view_of(rows, values));
  EXPECT_EQ(probe.first_bad, 6 * 3 + 2);
  EXPECT_EQ(probe.bad, (BadCounts{0, 1, 1}));
}

TEST(SparseScan, AgreesWithTheDenseGradient) {
  std::mt19937 random(21);
  for (int round = 0; round < 200; ++round) {
    const std::size_t elements = 1 + random() % 70;
    const std::size_t count = random() % 40;
    std::vector<std::int64_t> rows;
    std::vector<float> values;
    std::vector<float> dense(30 * elements, 0.0f);
    for (std::size_t i = 0; i < count; ++i) {
      rows.push_back(static_cast<std::int64_t>(random() % 30));
      for (std::size_t j = 0; j < elements; ++j) {
        values.push_back(random() % 500 == 0 ? 3e38f : static_cast<float>(random() % 100));
        dense[static_cast<std::size_t>(rows.back()) * elements + j] += values.back();
      }
    }
    const Probe expected = scan(TensorView::of(dense));
    const Probe probe = scanned(view_of(rows, values));
    EXPECT_EQ(probe.bad, expected.bad);
    EXPECT_EQ(probe.first_bad, expected.first_bad);
    EXPECT_EQ(probe.abs_max, expected.abs_max);
  }
}

TEST(SparseScan, AnEmptyGradientIsClean) {
  const Probe probe = scanned({{}, TensorView::contiguous(nullptr, DType::kFloat32, 0), 16});
  EXPECT_TRUE(probe.finite());
  EXPECT_EQ(probe.count, 0u);
}

TEST(SparseScan, WhatCannotBeJudgedIsRefused) {
  Probe probe;
  const std::vector<std::int64_t> rows = {0, 1};
  const std::vector<float> values = {1, 2, 3, 4};
  const std::vector<std::int64_t> negative = {0, -1};
  const std::vector<std::int64_t> far_away = {0, std::numeric_limits<std::int64_t>::max() / 2};
  for (const SparseView& view :
       {SparseView{rows, TensorView::of(values), 3}, SparseView{rows, TensorView::of(values), -2},
        SparseView{negative, TensorView::of(values), 2}, SparseView{far_away, TensorView::of(values), 2},
        SparseView{rows, TensorView::contiguous(values.data(), DType::kComplex64, 2), 1},
        SparseView{rows, TensorView::contiguous(values.data(), DType::kInt32, 4), 2}}) {
    EXPECT_EQ(scan_sparse(view, &probe).code(), StatusCode::kUsage);
  }
}

}  // namespace
}  // namespace holdfast
