// Rounding to 16 bits against an exact reference that knows values, not bit tricks.
#include "holdfast/half.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <random>
#include <vector>

#include "holdfast/scan.h"
#include "ranks/instruction_sets.h"

namespace holdfast {
namespace {

float float_of(std::uint32_t bits) { return std::bit_cast<float>(bits); }
std::uint32_t bits_of(float value) { return std::bit_cast<std::uint32_t>(value); }

// A format of 1 + exponent + fraction bits, as IEEE 754 defines it.
struct Format {
  const char* name;
  DType dtype;
  int fraction_bits;
  int bias;
  std::uint16_t infinity;  // its bits
  std::uint16_t (*encode)(float);
  float (*decode)(std::uint16_t);

  // Of a finite pattern without sign. Infinity's is what would come next, where rounding to infinity begins
  // from.
  double value(std::uint32_t pattern) const {
    const std::uint32_t exponent = pattern >> fraction_bits;
    const std::uint32_t fraction = pattern & ((1u << fraction_bits) - 1u);
    if (exponent == 0) return std::ldexp(static_cast<double>(fraction), 1 - bias - fraction_bits);
    return std::ldexp(static_cast<double>(fraction + (1u << fraction_bits)),
                      static_cast<int>(exponent) - bias - fraction_bits);
  }
  std::vector<double> values() const {
    std::vector<double> all;
    for (std::uint32_t pattern = 0; pattern <= infinity; ++pattern) all.push_back(value(pattern));
    return all;
  }
};

const Format kFp16 = {"fp16", DType::kFloat16, 10, 15, 0x7c00, to_fp16, from_fp16};
const Format kBf16 = {"bf16", DType::kBFloat16, 7, 127, 0x7f80, to_bf16, from_bf16};

// The nearest pattern, the even one of two that are equally near. Midpoints are exact in fp64.
class Reference {
 public:
  explicit Reference(const Format& format) : format_(format), values_(format.values()) {}

  std::uint16_t round(double value) const {
    const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    return static_cast<std::uint16_t>(sign | round_magnitude(std::abs(value)));
  }

 private:
  std::uint32_t round_magnitude(double value) const {
    if (value >= values_.back()) return format_.infinity;
    const auto above = std::ranges::upper_bound(values_, value);
    const auto low = static_cast<std::uint32_t>(above - values_.begin()) - 1;
    const double middle = (values_[low] + values_[low + 1]) / 2;
    if (value != middle) return value < middle ? low : low + 1;
    return low % 2 == 0 ? low : low + 1;
  }

  const Format& format_;
  const std::vector<double> values_;
};

class Half : public testing::TestWithParam<const Format*> {
 protected:
  const Format& format() const { return *GetParam(); }
  std::uint16_t encode(float value) const { return format().encode(value); }
  bool is_nan(std::uint16_t bits) const { return (bits & 0x7fff) > format().infinity; }
};

INSTANTIATE_TEST_SUITE_P(Formats, Half, testing::Values(&kFp16, &kBf16),
                         [](const auto& test) { return test.param->name; });

TEST_P(Half, EveryPatternHasItsValueAndComesBackFromIt) {
  for (std::uint32_t pattern = 0; pattern < 0x10000; ++pattern) {
    const auto bits = static_cast<std::uint16_t>(pattern);
    const float value = format().decode(bits);
    ASSERT_EQ(std::signbit(value), pattern >= 0x8000) << pattern;
    if (is_nan(bits)) {
      ASSERT_TRUE(std::isnan(value)) << pattern;
      ASSERT_TRUE(is_nan(encode(value))) << pattern;
      ASSERT_EQ(encode(value) & 0x8000, bits & 0x8000) << pattern;
      continue;
    }
    if ((bits & 0x7fff) == format().infinity) {
      ASSERT_TRUE(std::isinf(value)) << pattern;
    } else {
      ASSERT_EQ(std::abs(static_cast<double>(value)), format().value(bits & 0x7fff)) << pattern;
    }
    ASSERT_EQ(encode(value), bits) << pattern;
  }
}

TEST_P(Half, EveryMidpointGoesToTheEvenNeighbourAndItsOwnNeighboursToTheNearest) {
  for (std::uint32_t low = 0; low < format().infinity; ++low) {
    const double middle = (format().value(low) + format().value(low + 1)) / 2;
    const auto tie = static_cast<float>(middle);
    ASSERT_EQ(static_cast<double>(tie), middle);  // exact in fp32
    ASSERT_EQ(encode(tie), low + low % 2) << low;
    ASSERT_EQ(encode(-tie), 0x8000 + low + low % 2) << low;
    ASSERT_EQ(encode(float_of(bits_of(tie) - 1)), low) << low;
    ASSERT_EQ(encode(float_of(bits_of(tie) + 1)), low + 1) << low;
  }
}

TEST_P(Half, RandomBitsAreRoundedLikeTheReference) {
  const Reference reference(format());
  std::mt19937 random(11);
  for (int i = 0; i < 2'000'000; ++i) {
    const float value = float_of(static_cast<std::uint32_t>(random()));
    if (std::isnan(value)) {
      ASSERT_TRUE(is_nan(encode(value))) << std::hex << bits_of(value);
    } else {
      ASSERT_EQ(encode(value), reference.round(value)) << std::hex << bits_of(value);
    }
  }
}

// Where random bits seldom are: fp16's own range, its subnormals, and fp32's.
TEST_P(Half, RandomValuesOfEveryExponentAreRoundedLikeTheReference) {
  const Reference reference(format());
  std::mt19937 random(12);
  for (std::uint32_t exponent = 0; exponent < 255; ++exponent) {
    for (int i = 0; i < 4000; ++i) {
      const auto drawn = static_cast<std::uint32_t>(random());
      const float value = float_of((drawn & 0x807fffffu) | (exponent << 23));
      ASSERT_EQ(encode(value), reference.round(value)) << std::hex << bits_of(value);
    }
  }
}

TEST_P(Half, ANanStaysAQuietNanOfItsSignWhateverItsBits) {
  const auto quiet = static_cast<std::uint16_t>(1u << (format().fraction_bits - 1));
  for (int shift = 0; shift < 23; ++shift) {
    for (const std::uint32_t sign : {0u, 0x80000000u}) {
      const std::uint16_t bits = encode(float_of(sign | 0x7f800000u | (1u << shift)));
      EXPECT_TRUE(is_nan(bits)) << shift;
      EXPECT_EQ(bits & quiet, quiet) << shift;
      EXPECT_EQ(bits & 0x8000, sign >> 16) << shift;
    }
  }
}

TEST_P(Half, WholeArraysAreConvertedElementByElementOnEveryInstructionSet) {
  std::mt19937 random(13);
  for (const std::size_t size : {0u, 1u, 7u, 33u, 100'000u}) {
    std::vector<float> values(size);
    for (float& value : values) value = float_of(static_cast<std::uint32_t>(random()));
    for (std::size_t i = 0; i < size; i += 2)
      values[i] = std::ldexp(values[i] > 0 ? 1.0f + values[i] : 3.0f, -9);
    on_each_instruction_set([&](const char* name) {
      std::vector<std::uint16_t> narrowed(size, 0xdead);
      narrow(values, format().dtype, narrowed);
      std::vector<float> widened(size, -1.0f);
      widen(narrowed, format().dtype, widened);
      for (std::size_t i = 0; i < size; ++i) {
        ASSERT_EQ(narrowed[i], encode(values[i])) << name << std::hex << " " << bits_of(values[i]);
        ASSERT_EQ(bits_of(widened[i]), bits_of(format().decode(narrowed[i]))) << name;
      }
    });
  }
}

// Random pairs no further apart than fp64 can add exactly.
TEST_P(Half, ASumIsTheExactSumRoundedOnce) {
  const Reference reference(format());
  std::mt19937 random(14);
  int sums = 0;
  for (int i = 0; i < 600'000; ++i) {
    const auto a = static_cast<std::uint16_t>(random());
    const auto b = static_cast<std::uint16_t>(random());
    if ((a & 0x7fff) >= format().infinity || (b & 0x7fff) >= format().infinity) continue;
    if (std::abs((a & 0x7fff) - (b & 0x7fff)) >> format().fraction_bits > 30) continue;
    const double exact = static_cast<double>(format().decode(a)) + static_cast<double>(format().decode(b));
    if (exact == 0) continue;  // its sign is not what is looked at here
    std::vector<std::uint16_t> to = {a};
    add_halves(std::vector<std::uint16_t>{b}, format().dtype, to);
    ASSERT_EQ(to[0], reference.round(exact)) << std::hex << a << " + " << b;
    ++sums;
  }
  EXPECT_GT(sums, 100'000);
}

TEST(Fp16, TheEdgeOfItsRange) {
  EXPECT_EQ(to_fp16(65504.0f), 0x7bff);
  EXPECT_EQ(to_fp16(65519.99f), 0x7bff);
  EXPECT_EQ(to_fp16(65520.0f), 0x7c00);
  EXPECT_EQ(to_fp16(-65520.0f), 0xfc00);
  EXPECT_EQ(to_fp16(float_of(0x7f7fffff)), 0x7c00);
  EXPECT_EQ(to_fp16(0x1p-24f), 0x0001);
  EXPECT_EQ(to_fp16(0x1p-25f), 0x0000);
  EXPECT_EQ(to_fp16(-0x1p-25f), 0x8000);
  EXPECT_EQ(to_fp16(0x1.000002p-25f), 0x0001);
  EXPECT_EQ(to_fp16(0x1.ffep-15f), 0x0400);  // a subnormal that rounds up to the least normal
  EXPECT_EQ(to_fp16(float_of(0x00000001)), 0x0000);
}

TEST(Fp16, AnOverflowIsBornInASumOfFiniteValues) {
  const std::vector<std::uint16_t> from = {to_fp16(40000.0f), to_fp16(-40000.0f), to_fp16(1.0f)};
  std::vector<std::uint16_t> to = from;
  EXPECT_TRUE(scan(TensorView::contiguous(to.data(), DType::kFloat16, 3)).finite());
  add_halves(from, DType::kFloat16, to);
  EXPECT_EQ(to, (std::vector<std::uint16_t>{0x7c00, 0xfc00, to_fp16(2.0f)}));
  EXPECT_EQ(scan(TensorView::contiguous(to.data(), DType::kFloat16, 3)).bad.total(), 2u);
}

TEST(Bf16, TheSameSumIsFinite) {
  std::vector<std::uint16_t> to = {to_bf16(40000.0f)};
  add_halves(std::vector<std::uint16_t>{to_bf16(40000.0f)}, DType::kBFloat16, to);
  EXPECT_TRUE(scan(TensorView::contiguous(to.data(), DType::kBFloat16, 1)).finite());
}

// Field case 8: the class is that of the stored type.
TEST(Narrowing, MayMakeAnInfinityOfAFiniteValueButNeverSomethingElseOfANan) {
  const std::vector<float> values = {float_of(0x7f800001), float_of(0x7f7fffff), float_of(0xff800001),
                                     float_of(0xff7fffff)};
  const Probe wide = scan(TensorView::of(values));
  EXPECT_EQ(wide.bad.nan, 2u);
  EXPECT_EQ(wide.bad.total(), 2u);
  for (const Format* format : {&kFp16, &kBf16}) {
    std::vector<std::uint16_t> narrowed(values.size());
    narrow(values, format->dtype, narrowed);
    const Probe probe = scan(TensorView::contiguous(narrowed.data(), format->dtype, 4));
    EXPECT_EQ(probe.bad.nan, 2u) << format->name;
    EXPECT_EQ(probe.bad.pos_inf, 1u) << format->name;
    EXPECT_EQ(probe.bad.neg_inf, 1u) << format->name;
  }
  EXPECT_EQ(to_bf16(float_of(0x7f7fffff)), 0x7f80);
  EXPECT_EQ(to_bf16(float_of(0x7f7f7fff)), 0x7f7f);  // just below the midpoint to infinity
}

}  // namespace
}  // namespace holdfast
