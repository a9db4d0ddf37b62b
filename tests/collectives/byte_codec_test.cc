#include "byte_codec.h"

#include <gtest/gtest.h>

#include <random>

namespace holdfast {
namespace {

TEST(ByteCodec, IntegersAreLittleEndianAndTextHasA32BitLength) {
  EXPECT_EQ(ByteWriter().u8(0x9a).u32(0x01020384u).u64(0x0a0b0c0d0e0f10f1u).text("ab").raw("c").take(),
            std::string("\x9a"
                        "\x84\x03\x02\x01"
                        "\xf1\x10\x0f\x0e\x0d\x0c\x0b\x0a"
                        "\x02\x00\x00\x00"
                        "ab"
                        "c",
                        20));
}

TEST(ByteCodec, WhatWasWrittenIsReadBackBitForBit) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 200; ++round) {
    const auto a = static_cast<std::uint8_t>(random());
    const auto b = static_cast<std::uint32_t>(random());
    const std::uint64_t c = random();
    std::string text(random() % 300, '\0');
    for (char& byte : text) byte = static_cast<char>(random());
    const std::string bytes = ByteWriter().text(text).u64(c).u8(a).u32(b).text("").take();

    ByteReader reader(bytes);
    EXPECT_TRUE(reader.text() == text);
    EXPECT_EQ(reader.u64(), c);
    EXPECT_EQ(reader.u8(), a);
    EXPECT_FALSE(reader.done());
    EXPECT_EQ(reader.u32(), b);
    EXPECT_EQ(reader.text(), "");
    EXPECT_TRUE(reader.done());
  }
}

TEST(ByteCodec, NothingIsReadPastTheEndAndAllReadsAfterAreEmpty) {
  const std::string bytes = ByteWriter().u32(7).u8(1).u8(2).take();
  ByteReader reader(bytes);
  EXPECT_EQ(reader.u32(), 7u);
  EXPECT_EQ(reader.u32(), 0u);  // two bytes are left, and not taken
  EXPECT_FALSE(reader.ok());
  EXPECT_EQ(reader.u8(), 0);
  EXPECT_EQ(reader.u64(), 0u);
  EXPECT_EQ(reader.raw(1), "");
  EXPECT_EQ(reader.text(), "");
  EXPECT_FALSE(reader.done());
}

TEST(ByteCodec, ATextLongerThanTheBytesIsRefused) {
  for (const std::uint32_t claimed : {3u, 0x7fffffffu, 0xffffffffu}) {
    const std::string bytes = ByteWriter().u32(claimed).raw("ab").take();
    ByteReader reader(bytes);
    EXPECT_EQ(reader.text(), "") << claimed;
    EXPECT_FALSE(reader.ok()) << claimed;
  }
}

TEST(ByteCodec, EveryPrefixOfAMessageIsNotDone) {
  const std::string bytes = ByteWriter().text("host").u64(1).u8(2).take();
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    ByteReader reader(std::string_view(bytes).substr(0, size));
    reader.text();
    reader.u64();
    reader.u8();
    EXPECT_FALSE(reader.ok()) << size;
    EXPECT_FALSE(reader.done()) << size;
  }
}

}  // namespace
}  // namespace holdfast
