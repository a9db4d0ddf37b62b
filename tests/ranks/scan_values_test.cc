// Which values the scan counts, and as what. Compiled twice: against the library's scan, and against one
// built with -O3 -ffast-math, which must make no difference.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <random>

#include "ranks/scan_reference.h"

#ifdef __SSE2__
#include <xmmintrin.h>
#endif

namespace holdfast {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

const FloatFormat& fp32() { return formats()[1]; }
const FloatFormat& fp16() { return formats()[2]; }
const FloatFormat& bf16() { return formats()[3]; }

// Field case 5.
TEST(ScanValues, ASignallingNanAndBothInfinitiesAreSeenUnderAnyCompilerFlag) {
  const std::vector<float> values = {1, kNan, kInf, -kInf, std::bit_cast<float>(0x7f800001u), 2};
  const Probe probe = scan(TensorView::of(values));
  EXPECT_EQ(probe.bad, (BadCounts{2, 1, 1}));
  EXPECT_EQ(probe.bad.total(), 4u);
  EXPECT_EQ(probe.first_bad, 1);
  EXPECT_EQ(probe.abs_max, 2);
  EXPECT_EQ(probe.squares.value(), 5);
}

// Field case 7.
TEST(ScanValues, LargeFiniteValuesAreFinite) {
  const std::vector<float> values = {3e38f, 3e38f};
  const Probe probe = scan(TensorView::of(values));
  EXPECT_TRUE(probe.finite());
  EXPECT_EQ(probe.abs_max, static_cast<double>(3e38f));
  EXPECT_EQ(probe.squares.value(), 2 * static_cast<double>(3e38f) * static_cast<double>(3e38f));
}

TEST(ScanValues, OppositeInfinitiesAreTwoInfinitiesAndNoNan) {
  const std::vector<float> values = {kInf, -kInf};
  EXPECT_EQ(scan(TensorView::of(values)).bad, (BadCounts{0, 1, 1}));
}

TEST(ScanValues, AnEmptyTensorIsClean) {
  for (const FloatFormat& format : formats()) {
    const Probe probe = scan(TensorView::contiguous(nullptr, format.dtype, 0));
    EXPECT_TRUE(probe.finite());
    EXPECT_EQ(probe.count, 0u);
    EXPECT_EQ(probe.first_bad, -1);
    EXPECT_EQ(probe.abs_max, 0);
    EXPECT_EQ(probe.squares.value(), 0);
  }
}

// Field case 8: the class is that of the stored bits, whatever the value was before it was narrowed.
TEST(ScanValues, AValueIsCountedInTheTypeItIsStoredIn) {
  expect_scan(fp32(), {0x7f7fffff});  // the largest fp32 is finite ...
  const std::uint16_t rounded = 0x7f80;
  EXPECT_EQ(scan(TensorView::contiguous(&rounded, DType::kBFloat16, 1)).bad,
            (BadCounts{0, 1, 0}));  // ... until rounded
  const std::uint32_t signalling = 0x7f800001;
  EXPECT_EQ(scan(TensorView::contiguous(&signalling, DType::kFloat32, 1)).bad, (BadCounts{1, 0, 0}));
  const std::uint16_t kept_as_nan = 0x7fc0;
  EXPECT_EQ(scan(TensorView::contiguous(&kept_as_nan, DType::kBFloat16, 1)).bad, (BadCounts{1, 0, 0}));
  // The same bits are finite as fp16's neighbour type, and the other way round.
  const std::uint16_t bits = 0x7c00;
  EXPECT_EQ(scan(TensorView::contiguous(&bits, DType::kFloat16, 1)).bad, (BadCounts{0, 1, 0}));
  EXPECT_TRUE(scan(TensorView::contiguous(&bits, DType::kBFloat16, 1)).finite());
}

TEST(ScanValues, EveryPatternOf16BitsIsClassifiedRight) {
  for (const FloatFormat& format : {fp16(), bf16()}) {
    std::vector<std::uint64_t> all;
    for (std::uint64_t pattern = 0; pattern < 0x10000; ++pattern) {
      all.push_back(pattern);
      const auto bits = static_cast<std::uint16_t>(pattern);
      const Probe probe = scan(TensorView::contiguous(&bits, format.dtype, 1));
      expect_probe(probe, format, {pattern});
      if (testing::Test::HasFailure()) FAIL() << format.name << " pattern " << pattern;
    }
    expect_scan(format, all);
  }
}

TEST(ScanValues, EveryPatternOf16BitsIsClassifiedRightAmongOthers) {
  std::mt19937_64 random(1);
  for (const FloatFormat& format : {fp16(), bf16()}) {
    std::vector<std::uint64_t> all;
    for (std::uint64_t pattern = 0; pattern < 0x10000; ++pattern) all.push_back(pattern);
    std::shuffle(all.begin(), all.end(), random);
    expect_scan(format, all);
    std::erase_if(all, [&](std::uint64_t pattern) { return !format.is_finite(pattern); });
    expect_scan(format, all);  // no block is gone over twice
  }
}

TEST(ScanValues, RandomPatternsOfWideTypesAreClassifiedRight) {
  std::mt19937_64 random(2);
  for (const FloatFormat& format : formats()) {
    for (const std::uint64_t one_in : {1u, 2u, 50u, 5000u}) {  // how often the exponent is forced to all ones
      std::vector<std::uint64_t> patterns;
      for (int i = 0; i < 50000; ++i) {
        std::uint64_t pattern = random() & format.all_patterns_mask();
        if (random() % one_in == 0) pattern |= format.infinity();
        if (random() % 3 == 0) pattern &= ~format.fraction_mask();
        patterns.push_back(pattern);
      }
      expect_scan(format, patterns);
    }
  }
}

TEST(ScanValues, TheEdgesOfEachFormatAreClassifiedRight) {
  for (const FloatFormat& format : formats()) {
    const std::vector<std::uint64_t> magnitudes = {0,
                                                   1,
                                                   format.fraction_mask(),      // largest subnormal
                                                   format.fraction_mask() + 1,  // smallest normal
                                                   format.one(),
                                                   format.largest(),
                                                   format.infinity(),
                                                   format.signalling_nan(),
                                                   format.quiet_nan(),
                                                   format.quiet_nan() - 1,
                                                   format.sign_bit() - 1};
    std::vector<std::uint64_t> both_signs;
    for (const std::uint64_t magnitude : magnitudes) {
      for (const std::uint64_t pattern : {magnitude, magnitude | format.sign_bit()}) {
        expect_scan(format, {pattern});
        both_signs.push_back(pattern);
      }
    }
    expect_scan(format, both_signs);
  }
}

TEST(ScanValues, SubnormalsAreFiniteAndTheirLargestIsExact) {
  for (const FloatFormat& format : formats()) {
    expect_scan(format, {0, 1, 3, format.sign_bit() | 7, format.sign_bit()});
    expect_scan(format, std::vector<std::uint64_t>(3000, format.fraction_mask()));
  }
}

#ifdef __SSE2__
// Trainers switch the processor to flush subnormals, by a call or by linking with -ffast-math.
TEST(ScanValues, SubnormalsKeepTheirMagnitudeWhereTheProcessorFlushesThem) {
  constexpr unsigned kFlushToZeroAndDenormalsAreZero = 0x8040;
  for (const FloatFormat& format : formats()) {
    const std::vector<std::uint64_t> patterns = {0, 3, format.sign_bit() | 5};
    const Stored stored(format, patterns);
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | kFlushToZeroAndDenormalsAreZero);
    const Probe probe = scan(TensorView::contiguous(stored.at(0), format.dtype, 3));
    _mm_setcsr(before);
    EXPECT_TRUE(probe.finite()) << format.name;
    EXPECT_EQ(probe.abs_max, format.magnitude(5)) << format.name;
  }
}
#endif

TEST(ScanValues, NoFiniteValueOverflowsOrLosesTheNorm) {
  const double large = 1e200;
  const std::vector<double> values = {1, large, -large};
  const Probe probe = scan(TensorView::of(values));
  EXPECT_TRUE(probe.finite());
  EXPECT_EQ(probe.abs_max, large);
  EXPECT_EQ(probe.squares.value(), std::numeric_limits<double>::infinity());
  EXPECT_DOUBLE_EQ(probe.squares.root(), std::sqrt(2.0) * large);

  const std::vector<double> small(100, 3e-300);
  EXPECT_DOUBLE_EQ(scan(TensorView::of(small)).squares.root(), 3e-299);
  const std::vector<float> tiny(100, 1e-38f);
  EXPECT_DOUBLE_EQ(scan(TensorView::of(tiny)).squares.root(), 10 * static_cast<double>(1e-38f));
  const std::vector<double> largest(4, std::numeric_limits<double>::max() / 4);
  EXPECT_DOUBLE_EQ(scan(TensorView::of(largest)).squares.root(), std::numeric_limits<double>::max() / 2);
}

TEST(ScanValues, OfSmallIntegersTheSumOfSquaresIsExact) {
  std::vector<float> values;
  for (int i = -100; i <= 100; ++i) values.push_back(static_cast<float>(i));
  EXPECT_EQ(scan(TensorView::of(values)).squares.value(), 2.0 * 100 * 101 * 201 / 6);
}

TEST(ScanValues, TheSameElementsGiveTheSameBits) {
  std::mt19937_64 random(3);
  std::vector<float> values(5000);
  for (float& value : values) value = static_cast<float>(random()) * 1e-17f;
  const Probe once = scan(TensorView::of(values));
  const std::vector<float> elsewhere = values;
  const Probe again = scan(TensorView::of(elsewhere));
  EXPECT_EQ(std::bit_cast<std::uint64_t>(once.squares.value()),
            std::bit_cast<std::uint64_t>(again.squares.value()));
}

// Never "clean" for a type that was not looked at.
TEST(ScanValues, AnUnknownTypeIsNeverClean) {
  const std::uint64_t zero = 0;
  const Probe probe = scan(TensorView::contiguous(&zero, static_cast<DType>(99), 3));
  EXPECT_EQ(probe.bad.nan, 3u);
  EXPECT_EQ(probe.first_bad, 0);
  EXPECT_FALSE(is_known(static_cast<DType>(99)));
}

TEST(ScanValues, AnE4M3FNHasNoInfinity) {
  std::vector<std::uint8_t> all(256);
  double sum = 0;
  for (std::size_t i = 0; i < 256; ++i) {
    all[i] = static_cast<std::uint8_t>(i);
    const auto fraction = static_cast<double>(i & 7u);
    const int exponent = static_cast<int>((i >> 3) & 15u);
    const double magnitude =
        exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(8 + fraction, exponent - 7 - 3);
    const bool nan = (i & 0x7fu) == 0x7f;
    const Probe probe = scan(TensorView::contiguous(&all[i], DType::kFloat8E4M3FN, 1));
    EXPECT_EQ(probe.bad, (BadCounts{nan ? 1u : 0u, 0, 0})) << i;
    EXPECT_EQ(probe.abs_max, nan ? 0 : magnitude) << i;
    EXPECT_EQ(probe.squares.value(), nan ? 0 : magnitude * magnitude) << i;
    if (!nan) sum += magnitude * magnitude;
  }
  const Probe probe = scan(TensorView::contiguous(all.data(), DType::kFloat8E4M3FN, 256));
  EXPECT_EQ(probe.bad, (BadCounts{2, 0, 0}));
  EXPECT_EQ(probe.first_bad, 0x7f);
  EXPECT_EQ(probe.abs_max, 448);
  EXPECT_NEAR(probe.squares.value(), sum, sum * 0x1p-17);
}

// Field case 10.
TEST(ScanValues, AComplexElementWithABadPartIsOneBadElement) {
  const std::vector<float> values = {1, kNan, kInf, 0, 3, 4};
  const Probe probe = scan(TensorView::contiguous(values.data(), DType::kComplex64, 3));
  EXPECT_EQ(probe.count, 3u);
  EXPECT_EQ(probe.bad, (BadCounts{1, 1, 0}));
  EXPECT_EQ(probe.first_bad, 0);
  EXPECT_EQ(probe.abs_max, 4);
  EXPECT_EQ(probe.squares.value(), 25);
  EXPECT_FALSE(std::signbit(probe.squares.root()));

  const std::vector<double> wide = {2, -1, 0, -HUGE_VAL, HUGE_VAL, -HUGE_VAL, HUGE_VAL, std::nan("")};
  const Probe of_wide = scan(TensorView::contiguous(wide.data(), DType::kComplex128, 4));
  EXPECT_EQ(of_wide.bad, (BadCounts{1, 1, 1}));
  EXPECT_EQ(of_wide.first_bad, 1);
  EXPECT_EQ(of_wide.squares.value(), 5);
}

TEST(ScanValues, IntegersAndBoolAreFiniteWhateverTheirBits) {
  const std::vector<std::uint8_t> ones(64, 0xff);
  for (const DType dtype :
       {DType::kBool, DType::kUInt8, DType::kInt8, DType::kInt16, DType::kInt32, DType::kInt64}) {
    const Probe probe = scan(TensorView::contiguous(ones.data(), dtype, 8));
    EXPECT_TRUE(probe.finite()) << dtype_name(dtype);
    EXPECT_EQ(probe.count, 8u) << dtype_name(dtype);
  }
}

}  // namespace
}  // namespace holdfast
