// What the CUDA kernel computes, walked through on a CPU, has the bits of the CPU's own scan.
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>

#include "ranks/scan_cuda_host.h"
#include "ranks/scan_patterns.h"

namespace holdfast {
namespace {

void expect_same(const std::vector<TensorView>& views, const std::string& what) {
  cuda::ScanPlan plan;
  const Status status = cuda::plan_scan(views, &plan);
  ASSERT_TRUE(status.ok()) << status.message();
  const HostLaunch launch(plan);
  for (std::size_t i = 0; i < views.size(); ++i) {
    EXPECT_EQ(bits_of(to_probe(launch.results()[i])), bits_of(scan(views[i])))
        << what << ", tensor " << i << ", " << dtype_name(views[i].dtype) << ", " << views[i].element_count
        << " elements";
  }
}

template <class Bits>
Memory memory_of(const std::vector<Bits>& patterns) {
  Memory memory(patterns.size() * sizeof(Bits));
  std::memcpy(memory.data(), patterns.data(), memory.size());
  return memory;
}

TEST(ScanCudaHost, AgreesOnEachPatternOf16Bits) {
  std::vector<std::uint16_t> patterns(1 << 16);
  for (std::size_t i = 0; i < patterns.size(); ++i) patterns[i] = static_cast<std::uint16_t>(i);
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    const Memory all = memory_of(patterns);
    expect_same({TensorView::contiguous(all.data(), dtype, 1 << 16)}, "all patterns");
    std::vector<TensorView> alone;
    for (const std::uint16_t& pattern : patterns) alone.push_back(TensorView::contiguous(&pattern, dtype, 1));
    expect_same(alone, "each alone");
  }
}

TEST(ScanCudaHost, AgreesOnEachPatternOf8Bits) {
  std::vector<std::uint8_t> patterns(1 << 8);
  for (std::size_t i = 0; i < patterns.size(); ++i) patterns[i] = static_cast<std::uint8_t>(i);
  for (const DType dtype : {DType::kFloat8E4M3FN, DType::kFloat8E5M2}) {
    expect_same({TensorView::contiguous(patterns.data(), dtype, 1 << 8)}, "all patterns");
    for (std::size_t i = 0; i < patterns.size(); ++i) {
      const std::vector<std::uint8_t> rows(200, patterns[i]);  // in each place of a pack, and more
      expect_same(
          {TensorView::contiguous(&patterns[i], dtype, 1), TensorView::contiguous(&rows[0], dtype, 200)},
          "pattern " + std::to_string(i));
    }
  }
}

template <class Bits>
void expect_same_at_corners(DType dtype, int fraction_bits, int exponent_step) {
  const int bits = 8 * static_cast<int>(sizeof(Bits));
  std::vector<Bits> corners;
  for (int exponent = 0; exponent < 1 << (bits - 1 - fraction_bits); exponent += exponent_step) {
    const Bits ones = (Bits{1} << fraction_bits) - 1;
    for (const Bits fraction : {Bits{0}, Bits{1}, ones, Bits(ones >> 1), Bits(ones >> 20)}) {
      const Bits pattern = Bits(Bits(exponent) << fraction_bits) | fraction;
      corners.push_back(pattern);
      corners.push_back(pattern | Bits{1} << (bits - 1));
    }
  }
  std::vector<TensorView> views;
  for (const Bits& corner : corners) views.push_back(TensorView::contiguous(&corner, dtype, 1));
  // Runs of equal exponents, which overflow, underflow or lie at a threshold together.
  for (std::size_t i = 0; i + 10 <= corners.size(); i += 10) {
    views.push_back(TensorView::contiguous(&corners[i], dtype, 10));
  }
  views.push_back(TensorView::contiguous(corners.data(), dtype, static_cast<std::int64_t>(corners.size())));
  expect_same(views, "corners");
}

TEST(ScanCudaHost, AgreesOnEachExponentOfFp32AndFp64) {
  expect_same_at_corners<std::uint32_t>(DType::kFloat32, 23, 1);
  expect_same_at_corners<std::uint64_t>(DType::kFloat64, 52, 1);
}

// Sizes around those of a pack, a row, a block, a chunk, a tile and the strands; both ways of loading.
TEST(ScanCudaHost, AgreesOnAnySizeAndAlignment) {
  std::mt19937_64 random(21);
  for (const DType dtype : float_dtypes()) {
    const auto width = static_cast<std::size_t>(dtype_size(dtype));
    const bool complex = dtype == DType::kComplex64 || dtype == DType::kComplex128;
    const std::size_t part = complex ? width / 2 : width;
    const std::int64_t chunk = chunk_elements(dtype);
    const std::int64_t row = chunk / kBlocksPerChunk / kRows;
    std::vector<std::int64_t> sizes = {0,
                                       1,
                                       2,
                                       3,
                                       row - 1,
                                       row,
                                       row + 1,
                                       8 * row,
                                       9 * row - 1,
                                       64 * row - 1,
                                       64 * row,
                                       64 * row + 1,
                                       chunk - 1,
                                       chunk,
                                       chunk + 1,
                                       2 * chunk + 1,
                                       4 * chunk - 1,
                                       4 * chunk + 3,
                                       32 * chunk,
                                       33 * chunk + 5};
    const Memory memory =
        random_memory(static_cast<std::size_t>(sizes.back()) * width + 64, dtype, random, true);
    const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
    ASSERT_EQ(address % 16, 0u);
    std::vector<TensorView> views;
    for (const std::int64_t size : sizes) {
      views.push_back(TensorView::contiguous(memory.data(), dtype, size));
      if (size > 5 * chunk) continue;
      for (const std::size_t off : {std::size_t{1}, std::size_t{3}, 16 / part}) {
        views.push_back(TensorView::contiguous(memory.data() + off * part, dtype, size));
      }
    }
    expect_same(views, "sizes");
  }
}

TEST(ScanCudaHost, AgreesOnPlantedValues) {
  std::mt19937_64 random(22);
  for (const DType dtype : float_dtypes()) {
    const auto width = static_cast<std::size_t>(dtype_size(dtype));
    const bool complex = dtype == DType::kComplex64 || dtype == DType::kComplex128;
    const auto count = static_cast<std::size_t>(2 * chunk_elements(dtype) + 77);
    const std::size_t parts = complex ? 2 * count : count;
    const Bad bad = patterns_of(dtype);
    for (int round = 0; round < 12; ++round) {
      Memory memory = random_memory(count * width + 16, dtype, random, true);
      for (const std::uint64_t pattern : {bad.nan, bad.pos_inf, bad.neg_inf, bad.largest}) {
        if (random() % 3 == 0) continue;
        const std::size_t at = random() % parts;
        put(memory, at, pattern, dtype, width);
        if (round % 4 == 0) put(memory, at ^ 1, bad.nan, dtype, width);
      }
      if (round % 4 == 1) put(memory, 0, bad.neg_inf, dtype, width);
      if (round % 4 == 2) put(memory, parts - 1, bad.pos_inf, dtype, width);
      const std::size_t off = round % 2 == 0 ? 0 : complex ? width / 2 : width;
      expect_same({TensorView::contiguous(memory.data() + off, dtype, static_cast<std::int64_t>(count) - 1)},
                  "round " + std::to_string(round));
    }
  }
}

TEST(ScanCudaHost, AgreesOnPatternsOfAnyKindAndOnNothingButBadOnes) {
  std::mt19937_64 random(23);
  for (const DType dtype : float_dtypes()) {
    const auto width = static_cast<std::size_t>(dtype_size(dtype));
    const std::int64_t count = chunk_elements(dtype) + 1001;
    const std::size_t bytes = static_cast<std::size_t>(count) * width;
    const Memory any = random_memory(bytes, dtype, random, false);
    const Memory all(bytes, std::byte{0xff});
    const Memory zeros(bytes);
    expect_same(
        {TensorView::contiguous(any.data(), dtype, count), TensorView::contiguous(all.data(), dtype, count),
         TensorView::contiguous(zeros.data(), dtype, count)},
        "patterns");
  }
}

// Blocks whose squares underflow or overflow, wholly or in part, are summed another way.
TEST(ScanCudaHost, AgreesWhereSumsLeaveTheRange) {
  std::mt19937_64 random(24);
  for (const DType dtype :
       {DType::kFloat32, DType::kBFloat16, DType::kComplex64, DType::kFloat64, DType::kComplex128}) {
    const bool wide = dtype == DType::kFloat64 || dtype == DType::kComplex128;
    const std::int64_t count = chunk_elements(dtype) + 99;
    const auto bytes = static_cast<std::size_t>(count * dtype_size(dtype));
    for (const int exponent : {-149, -140, -127, -75, -64, -60, -52, -51, -45, 57, 58, 60, 64, 100, 120}) {
      Memory memory = random_memory(bytes, dtype, random, true, wide ? exponent * 8 : exponent);
      expect_same({TensorView::contiguous(memory.data(), dtype, count)}, "2^" + std::to_string(exponent));
      put(memory, 5, patterns_of(dtype).nan, dtype, static_cast<std::size_t>(dtype_size(dtype)));
      expect_same({TensorView::contiguous(memory.data(), dtype, count)},
                  "2^" + std::to_string(exponent) + " and a NaN");
    }
  }
}

TEST(ScanCudaHost, AgreesOnAListOfMixedTypes) {
  std::mt19937_64 random(25);
  std::vector<Memory> memories;
  std::vector<TensorView> views;
  for (int i = 0; i < 300; ++i) {
    const DType dtype = static_cast<DType>(random() % (static_cast<int>(DType::kInt64) + 1));
    const auto count = static_cast<std::int64_t>(random() % (i % 50 == 0 ? 100000 : 500));
    memories.push_back(
        random_memory(static_cast<std::size_t>(count * dtype_size(dtype)) + 8, dtype, random, i % 3 > 0));
    views.push_back(TensorView::contiguous(memories.back().data(), dtype, count));
  }
  expect_same(views, "list");
}

}  // namespace
}  // namespace holdfast
