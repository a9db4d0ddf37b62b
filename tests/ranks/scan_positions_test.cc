// Where the scan finds a value: every length and position, every kind of view.
#include <gtest/gtest.h>

#include <chrono>
#include <random>

#include "ranks/scan_reference.h"

namespace holdfast {
namespace {

using Shape = std::vector<std::int64_t>;

std::vector<std::uint64_t> random_finite(const FloatFormat& format, std::size_t count,
                                         std::mt19937_64& random) {
  std::vector<std::uint64_t> patterns;
  while (patterns.size() < count) {
    const std::uint64_t pattern = random() & format.all_patterns_mask();
    if (format.is_finite(pattern)) patterns.push_back(pattern);
  }
  return patterns;
}

// The patterns that a view of `storage` shows, in row-major order; element 0 of the view is storage[origin].
std::vector<std::uint64_t> shown(const std::vector<std::uint64_t>& storage, std::size_t origin,
                                 const Shape& shape, const Shape& strides) {
  std::vector<std::uint64_t> patterns;
  std::int64_t count = 1;
  for (const std::int64_t extent : shape) count *= extent;
  for (std::int64_t flat = 0; flat < count; ++flat) {
    std::int64_t rest = flat;
    auto offset = static_cast<std::int64_t>(origin);
    for (std::size_t d = shape.size(); d-- > 0; rest /= shape[d]) offset += rest % shape[d] * strides[d];
    patterns.push_back(storage[static_cast<std::size_t>(offset)]);
  }
  return patterns;
}

void expect_view(const FloatFormat& format, const std::vector<std::uint64_t>& storage, std::size_t origin,
                 const Shape& shape, const Shape& strides) {
  SCOPED_TRACE(std::string(format.name) + ", shape " + testing::PrintToString(shape) + ", strides " +
               testing::PrintToString(strides));
  const Stored stored(format, storage);
  expect_probe(scan(TensorView::strided(stored.at(origin), format.dtype, shape, strides)), format,
               shown(storage, origin, shape, strides));
}

TEST(ScanPositions, OneBadValueIsFoundAtAnyPlaceOfAnyLength) {
  std::vector<std::size_t> lengths;
  for (std::size_t n = 0; n <= 70; ++n) lengths.push_back(n);
  lengths.insert(lengths.end(),
                 {255, 1023, 1024, 1025, 1039, 1040, 1041, 2047, 2048, 2049, 4095, 4096, 4097});
  std::mt19937_64 random(1);
  for (const FloatFormat& format : formats()) {
    for (const std::size_t n : lengths) {
      const std::vector<std::uint64_t> clean = random_finite(format, n, random);
      expect_scan(format, clean);
      if (n == 0) continue;
      for (const std::size_t place : {std::size_t{0}, n / 2, n - 1}) {
        for (const std::uint64_t bad : {format.quiet_nan(), format.signalling_nan() | format.sign_bit(),
                                        format.infinity(), format.infinity() | format.sign_bit()}) {
          std::vector<std::uint64_t> patterns = clean;
          patterns[place] = bad;
          expect_scan(format, patterns);
        }
      }
      if (testing::Test::HasFailure()) FAIL() << "at length " << n;
    }
  }
}

TEST(ScanPositions, TheFirstOfSeveralIsNamedAcrossBlocks) {
  for (const FloatFormat& format : formats()) {
    std::vector<std::uint64_t> patterns(5000, format.one());
    for (const std::size_t place : {4999u, 3000u, 1024u, 1023u, 17u}) {
      patterns[place] = format.infinity();
      expect_scan(format, patterns);
    }
  }
}

TEST(ScanPositions, NothingOutsideTheViewIsRead) {
  for (const FloatFormat& format : formats()) {
    std::vector<std::uint64_t> storage(1100, format.quiet_nan());
    for (std::size_t i = 10; i < 1060; ++i) storage[i] = format.one();
    const Stored stored(format, storage);
    EXPECT_TRUE(scan(TensorView::contiguous(stored.at(10), format.dtype, 1050)).finite());
    EXPECT_EQ(scan(TensorView::contiguous(stored.at(10), format.dtype, 1051)).bad.nan, 1u);
    EXPECT_EQ(scan(TensorView::contiguous(stored.at(0), format.dtype, 1100).slice(10, 1050)).bad.nan, 0u);
    EXPECT_EQ(scan(TensorView::contiguous(stored.at(0), format.dtype, 1100).slice(9, 1050)).first_bad, 0);
  }
}

// Field case 6.
TEST(ScanPositions, OneNanInAnyOfFiveTensorsIsFoundInThatTensorAlone) {
  for (const FloatFormat& format : formats()) {
    for (std::size_t bad_tensor = 0; bad_tensor < 5; ++bad_tensor) {
      for (const std::size_t place : {0u, 500u, 999u}) {
        for (std::size_t tensor = 0; tensor < 5; ++tensor) {
          std::vector<std::uint64_t> patterns(1000, format.one());
          if (tensor == bad_tensor) patterns[place] = format.quiet_nan();
          const Stored stored(format, patterns);
          const Probe probe = scan(TensorView::contiguous(stored.at(0), format.dtype, 1000));
          EXPECT_EQ(probe.bad.total(), tensor == bad_tensor ? 1u : 0u);
          EXPECT_EQ(probe.first_bad, tensor == bad_tensor ? static_cast<std::int64_t>(place) : -1);
        }
      }
    }
  }
}

// Field case 11: one stored value behind 128 elements.
TEST(ScanViews, StridesOfZeroReadTheOneStoredValueOnly) {
  for (const FloatFormat& format : formats()) {
    for (const std::uint64_t pattern :
         {format.one(), format.quiet_nan(), format.infinity() | format.sign_bit()}) {
      expect_view(format, {pattern}, 0, {64, 2}, {0, 0});
      expect_view(format, {pattern}, 0, {3000}, {0});
    }
  }
}

TEST(ScanViews, ANanInTheGapOfATransposedViewIsNotInTheTensor) {
  for (const FloatFormat& format : formats()) {
    // Six rows of nine, of which the view shows seven columns, transposed.
    std::vector<std::uint64_t> storage(6 * 9, format.one());
    for (std::size_t row = 0; row < 6; ++row)
      storage[row * 9 + 7] = storage[row * 9 + 8] = format.quiet_nan();
    const Stored clean(format, storage);
    const Shape shape = {7, 6};
    const Shape strides = {1, 9};
    EXPECT_TRUE(scan(TensorView::strided(clean.at(0), format.dtype, shape, strides)).finite());
    expect_view(format, storage, 0, shape, strides);

    storage[2 * 9 + 3] = format.quiet_nan();  // inside: element (3, 2) of the view
    const Stored dirty(format, storage);
    EXPECT_EQ(scan(TensorView::strided(dirty.at(0), format.dtype, shape, strides)).bad.nan, 1u);
    EXPECT_EQ(scan(TensorView::strided(dirty.at(0), format.dtype, shape, strides)).first_bad, 3 * 6 + 2);
    expect_view(format, storage, 0, shape, strides);
  }
}

TEST(ScanViews, NegativeStridesWalkBack) {
  std::mt19937_64 random(4);
  for (const FloatFormat& format : formats()) {
    std::vector<std::uint64_t> storage = random_finite(format, 2100, random);
    storage[1] = format.quiet_nan();
    expect_view(format, storage, 2099, {2100}, {-1});
    expect_view(format, storage, 2099, {1050}, {-2});  // ends on storage[1]
    expect_view(format, storage, 2098, {1050}, {-2});  // passes it by
    expect_view(format, storage, 41, {6, 7}, {-7, -1});
    expect_view(format, storage, 35, {6, 7}, {-7, 1});
  }
}

TEST(ScanViews, AnyStridesGiveRowMajorIndices) {
  std::mt19937_64 random(5);
  for (const FloatFormat& format : formats()) {
    for (int round = 0; round < 200; ++round) {
      const std::size_t dimensions = 1 + random() % 4;
      Shape shape;
      Shape strides;
      std::int64_t lowest = 0;
      std::int64_t highest = 0;
      for (std::size_t d = 0; d < dimensions; ++d) {
        shape.push_back(1 + static_cast<std::int64_t>(random() % 6));
        strides.push_back(static_cast<std::int64_t>(random() % 21) - 10);
        const std::int64_t reach = (shape[d] - 1) * strides[d];
        (reach < 0 ? lowest : highest) += reach;
      }
      std::vector<std::uint64_t> storage =
          random_finite(format, static_cast<std::size_t>(highest - lowest + 1), random);
      if (round % 2 == 0) storage[random() % storage.size()] = format.quiet_nan();
      expect_view(format, storage, static_cast<std::size_t>(-lowest), shape, strides);
      if (testing::Test::HasFailure()) FAIL() << "in round " << round;
    }
  }
}

TEST(ScanViews, LongRowsAreFollowedAcrossBlocks) {
  for (const FloatFormat& format : formats()) {
    std::vector<std::uint64_t> storage(3 * 2500, format.one());
    storage[2 * 2500 + 1999] = format.infinity();
    expect_view(format, storage, 0, {3, 2000}, {2500, 1});
    expect_view(format, storage, 0, {3, 1250}, {2500, 2});  // an odd column, not shown
    expect_view(format, storage, 1, {3, 1000}, {2500, 2});  // and shown
  }
}

TEST(ScanViews, WithoutDimensionsThereIsOneElement) {
  for (const FloatFormat& format : formats()) {
    expect_view(format, {format.one()}, 0, {}, {});
    expect_view(format, {format.quiet_nan()}, 0, {}, {});
  }
}

TEST(ScanViews, AnExtentOfZeroAnywhereIsAnEmptyTensor) {
  for (const FloatFormat& format : formats()) {
    for (const Shape& shape : {Shape{0}, Shape{0, 5}, Shape{5, 0}, Shape{2, 0, 3}, Shape{0, 0}}) {
      const Shape strides(shape.size(), 1);
      const Probe probe = scan(TensorView::strided(nullptr, format.dtype, shape, strides));
      EXPECT_EQ(probe.count, 0u) << testing::PrintToString(shape);
      EXPECT_TRUE(probe.finite());
    }
  }
}

TEST(ScanViews, StridesOfDimensionsOfOneAreOfNoAccount) {
  for (const FloatFormat& format : formats()) {
    expect_view(format, {format.one(), format.infinity()}, 0, {1, 2, 1}, {1000000, 1, -1000000});
  }
}

TEST(ScanViews, CountsAndIndicesGoBeyond32Bits) {
#if !defined(NDEBUG) || defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "reads 2^32 elements: for optimised builds";
#else
  // Rows that overlap, each one element further: the last element of the last row is the only bad one.
  const Shape shape = {65537, 65536};
  const Shape strides = {1, 1};
  std::vector<float> storage(65536 + 65536, 1.0f);
  storage.back() = INFINITY;
  const Probe probe = scan(TensorView::strided(storage.data(), DType::kFloat32, shape, strides));
  EXPECT_EQ(probe.count, 65537ull * 65536ull);
  EXPECT_EQ(probe.bad, (BadCounts{0, 1, 0}));
  EXPECT_EQ(probe.first_bad, 65537ll * 65536ll - 1);
#endif
}

}  // namespace
}  // namespace holdfast
