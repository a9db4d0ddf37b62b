// What is joined gives, bit for bit, what its parts give one after the other.
#include "holdfast/fused_scan.h"

#include <gtest/gtest.h>
#include <xxhash.h>

#include <bit>
#include <limits>
#include <random>
#include <vector>

#include "holdfast/half.h"

namespace holdfast {
namespace {

void expect_same(const Probe& probe, const Probe& expected) {
  EXPECT_EQ(probe.count, expected.count);
  EXPECT_EQ(probe.bad, expected.bad);
  EXPECT_EQ(probe.first_bad, expected.first_bad);
  EXPECT_EQ(probe.abs_max, expected.abs_max);
  EXPECT_EQ(probe.squares, expected.squares);
}

std::vector<std::uint32_t> bits_of(const std::vector<float>& values) {
  std::vector<std::uint32_t> bits;
  for (const float value : values) bits.push_back(std::bit_cast<std::uint32_t>(value));
  return bits;
}

// Around the edges of rows, blocks and chunks; the last ones take several strands.
const std::vector<std::size_t> kSizes = {0, 1, 63, 64, 65, 4095, 4096, 4097, 32767, 32768, 32769, 1100000};

std::vector<float> random_values(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = std::ldexp(normal(random), static_cast<int>(random() % 60) - 40);
  if (count > 40000) {
    values[1] = 1e38f;  // infinite as fp16
    values[count / 2] = std::numeric_limits<float>::quiet_NaN();
    values[count - 1] = -std::numeric_limits<float>::infinity();
  }
  return values;
}

TEST(FusedScan, ScalesAndScans) {
  for (const std::size_t size : kSizes) {
    for (const float factor : {1.0f, 0.5f, 1.0f / 3, 1e30f}) {
      std::vector<float> values = random_values(size, 1);
      std::vector<float> expected = values;
      for (float& value : expected) value *= factor;
      const Probe probe = scale_and_scan(values, factor);
      EXPECT_EQ(bits_of(values), bits_of(expected));
      expect_same(probe, scan(TensorView::of(expected)));
    }
  }
}

TEST(FusedScan, NarrowsAndScans) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (const std::size_t size : kSizes) {
      const std::vector<float> values = random_values(size, 2);
      std::vector<std::uint16_t> out(size, 0xdead);
      const Probe probe = narrow_and_scan(values, dtype, out);
      for (std::size_t i = 0; i < size; ++i) {
        ASSERT_EQ(out[i], dtype == DType::kFloat16 ? to_fp16(values[i]) : to_bf16(values[i])) << i;
      }
      expect_same(probe, scan(TensorView::contiguous(out.data(), dtype, static_cast<std::int64_t>(size))));
    }
  }
}

TEST(FusedScan, WidensAndScans) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (const std::size_t size : kSizes) {
      std::mt19937 random(3);
      std::vector<std::uint16_t> values(size);
      for (std::uint16_t& value : values) value = static_cast<std::uint16_t>(random());
      for (const float factor : {1.0f, 0x1p-16f}) {
        std::vector<float> out(size, -7.0f);
        const Probe probe = widen_and_scan(values, dtype, factor, out);
        for (std::size_t i = 0; i < size; ++i) {
          const float expected =
              (dtype == DType::kFloat16 ? from_fp16(values[i]) : from_bf16(values[i])) * factor;
          ASSERT_TRUE(std::bit_cast<std::uint32_t>(out[i]) == std::bit_cast<std::uint32_t>(expected) ||
                      (out[i] != out[i] && expected != expected))
              << i;
        }
        expect_same(probe, scan(TensorView::of(out)));
      }
    }
  }
}

TEST(FusedScan, ScansAndDigests) {
  std::mt19937_64 random(4);
  for (const DType dtype : {DType::kFloat64, DType::kFloat32, DType::kBFloat16, DType::kFloat8E5M2,
                            DType::kComplex64, DType::kInt32, DType::kBool}) {
    for (const std::size_t size : kSizes) {
      std::vector<std::byte> memory(size * static_cast<std::size_t>(dtype_size(dtype)));
      for (std::byte& byte : memory) byte = static_cast<std::byte>(random());
      const TensorView view = TensorView::contiguous(memory.data(), dtype, static_cast<std::int64_t>(size));
      Digest128 digest;
      expect_same(scan_and_digest(view, &digest), scan(view));
      const XXH128_hash_t expected = XXH3_128bits(memory.data(), memory.size());
      EXPECT_EQ(digest, (Digest128{expected.low64, expected.high64})) << dtype_name(dtype) << ", " << size;
    }
  }
}

TEST(FusedScan, ScansAndDigestsInPieces) {
  std::mt19937_64 random(5);
  for (const DType dtype :
       {DType::kFloat64, DType::kFloat32, DType::kBFloat16, DType::kComplex64, DType::kInt32}) {
    for (const std::size_t size : {0, 1, 4097, 1 << 17, (1 << 17) + 1, 1100000}) {
      const auto width = static_cast<std::size_t>(dtype_size(dtype));
      std::vector<std::byte> memory(size * width);
      for (std::byte& byte : memory)
        byte = static_cast<std::byte>(random() % 4 == 0 ? 0xff : random() % 0x50);
      const TensorView view = TensorView::contiguous(memory.data(), dtype, static_cast<std::int64_t>(size));
      Digest128 expected;
      const Probe in_one = scan_and_digest(view, &expected);
      ScanAndDigest pieces(dtype);
      const auto step = static_cast<std::size_t>(ScanAndDigest::kPieceElements);
      for (std::size_t at = 0, piece = 1; at < size; at += step * piece, piece = 3 - piece) {
        const std::size_t n = std::min(step * piece, size - at);
        pieces.add(memory.data() + at * width, static_cast<std::int64_t>(n));
      }
      EXPECT_EQ(pieces.so_far().first_bad, in_one.first_bad);
      Digest128 digest;
      expect_same(pieces.finish(&digest), in_one);
      EXPECT_EQ(digest, expected) << dtype_name(dtype) << ", " << size;
    }
  }
}

}  // namespace
}  // namespace holdfast
