#include "checkpoint/part_file.h"

#include <gtest/gtest.h>
#include <xxhash.h>

#include <cmath>
#include <complex>
#include <limits>

#include "coord/temp_dir.h"
#include "holdfast/checkpoint/manifest.pb.h"
#include "holdfast/coord/storage/sha256.h"

namespace holdfast {
namespace {

constexpr std::int64_t kMebi = 1 << 20;

Status write(const TempDir& temp, const std::vector<PartTensor>& tensors, Part* part,
             std::optional<NonFinite>* finding) {
  std::filesystem::remove(temp / part_file_name(3));
  return write_part(real_file_system(), temp.path(), 3, tensors, part, finding);
}

Part write_clean(const TempDir& temp, const std::vector<PartTensor>& tensors) {
  Part part;
  std::optional<NonFinite> finding;
  const Status status = write(temp, tensors, &part, &finding);
  EXPECT_TRUE(status.ok()) << status.message();
  return part;
}

const std::vector<DType> kEveryDtype = {
    DType::kFloat64,    DType::kFloat32,   DType::kFloat16,    DType::kBFloat16, DType::kFloat8E4M3FN,
    DType::kFloat8E5M2, DType::kComplex64, DType::kComplex128, DType::kBool,     DType::kUInt8,
    DType::kInt8,       DType::kInt16,     DType::kInt32,      DType::kInt64};

TEST(PartFile, IsCalledAfterItsRank) {
  EXPECT_EQ(part_file_name(-1), "replicated.safetensors");
  EXPECT_EQ(part_file_name(0), "rank-00000.safetensors");
  EXPECT_EQ(part_file_name(123456), "rank-123456.safetensors");
}

TEST(PartFile, HoldsEveryDtypeBitByBit) {
  const TempDir temp;
  std::vector<std::vector<char>> memory;
  std::vector<PartTensor> tensors;
  for (const DType dtype : kEveryDtype) {
    // 0x11 in each byte is a small number in every type.
    memory.emplace_back(static_cast<std::size_t>(6 * dtype_size(dtype)), static_cast<char>(0x11));
    tensors.push_back({.name = std::string(dtype_name(dtype)),
                       .data = memory.back().data(),
                       .dtype = dtype,
                       .shape = {2, 3}});
  }
  const Part part = write_clean(temp, tensors);
  PartReader reader;
  ASSERT_TRUE(reader.open(real_file_system(), temp.path(), part).ok());
  ASSERT_EQ(reader.tensors(), static_cast<int>(kEveryDtype.size()));
  std::uint64_t before = 16;
  for (int i = 0; i < reader.tensors(); ++i) {
    const TensorEntry& entry = reader.tensor(i);
    const auto which = static_cast<std::size_t>(std::ranges::find(tensors, entry.name(), &PartTensor::name) -
                                                tensors.begin());
    std::vector<std::byte> bytes(memory[which].size());
    std::optional<NonFinite> finding;
    ASSERT_TRUE(reader.read_tensor(i, bytes, &finding).ok()) << entry.name();
    EXPECT_EQ(std::memcmp(bytes.data(), memory[which].data(), bytes.size()), 0) << entry.name();
    // Larger elements first, so that each is aligned in the file.
    const std::uint64_t width = safetensors_dtype_size(entry.dtype());
    EXPECT_LE(width, before);
    EXPECT_EQ(entry.begin() % width, 0u);
    before = width;
    const bool pairs = kEveryDtype[which] == DType::kComplex128;
    const std::vector<std::uint64_t> shape =
        pairs ? std::vector<std::uint64_t>{2, 3, 2} : std::vector<std::uint64_t>{2, 3};
    EXPECT_TRUE(std::ranges::equal(entry.shape(), shape)) << entry.name();
    EXPECT_EQ(entry.dtype(), pairs ? "F64" : stored_dtype(kEveryDtype[which]));
  }
}

TEST(PartFile, EveryDtypeButComplex128ComesBackAsItself) {
  for (const DType dtype : kEveryDtype) {
    DType back = DType::kBool;
    ASSERT_TRUE(parse_stored_dtype(stored_dtype(dtype), &back));
    EXPECT_EQ(back, dtype == DType::kComplex128 ? DType::kFloat64 : dtype);
    EXPECT_EQ(safetensors_dtype_size(stored_dtype(dtype)), static_cast<std::uint64_t>(dtype_size(back)));
  }
  DType back = DType::kBool;
  EXPECT_FALSE(parse_stored_dtype("U64", &back));
  EXPECT_EQ(stored_dtype(static_cast<DType>(99)), "");
}

TEST(PartFile, TellsTheManifestOfItsDigests) {
  const TempDir temp;
  const std::vector<float> values = {1, 2, 3};
  const Part part = write_clean(temp, {{.name = "a", .data = values.data(), .shape = {3}}});
  const std::string file = read_file(temp / "rank-00003.safetensors");
  EXPECT_EQ(part.file(), "rank-00003.safetensors");
  EXPECT_EQ(part.rank(), 3);
  EXPECT_EQ(part.file_bytes(), file.size());
  EXPECT_EQ(part.header_sha256(), sha256(file.substr(0, file.size() - 12)));
  const XXH128_hash_t digest = XXH3_128bits(values.data(), 12);
  EXPECT_EQ(part.tensors(0).digest_high(), digest.high64);
  EXPECT_EQ(part.tensors(0).digest_low(), digest.low64);
  EXPECT_EQ(file.substr(file.size() - 12), std::string(reinterpret_cast<const char*>(values.data()), 12));
}

TEST(PartFile, WithoutTensorsOrElementsIsOne) {
  const TempDir temp;
  Part part = write_clean(temp, {});
  PartReader reader;
  EXPECT_TRUE(reader.open(real_file_system(), temp.path(), part).ok());
  EXPECT_EQ(reader.tensors(), 0);
  const double scalar = 4;
  part = write_clean(temp, {{.name = "none", .shape = {0, 5}},
                            PartTensor::of_bytes("no bytes", ""),
                            {.name = "scalar", .data = &scalar, .dtype = DType::kFloat64, .shape = {}}});
  ASSERT_TRUE(reader.open(real_file_system(), temp.path(), part).ok());
  for (int i = 0; i < 3; ++i) {
    std::optional<NonFinite> finding;
    EXPECT_TRUE(reader.check_tensor(i, &finding).ok());
    EXPECT_EQ(reader.tensor(i).is_bytes(), reader.tensor(i).name() == "no bytes");
  }
}

// Over the edges of the blocks in which it is written and read.
class LargePart : public ::testing::TestWithParam<DType> {};

TEST_P(LargePart, FindsTheFirstBadValueWhereverItIs) {
  const TempDir temp;
  const DType dtype = GetParam();
  const auto width = static_cast<std::size_t>(dtype_size(dtype));
  const auto block = static_cast<std::size_t>(std::max<std::int64_t>(kMebi / dtype_size(dtype), 1 << 17));
  const std::size_t elements = 2 * block + 5;
  std::vector<unsigned char> memory(elements * width, 0x11);
  for (const std::size_t at : {std::size_t{0}, block - 1, block, 2 * block, elements - 1}) {
    std::vector<unsigned char> bad = memory;
    for (std::size_t e : {at, elements - 1})
      std::fill_n(bad.begin() + static_cast<std::ptrdiff_t>(e * width), width, 0xff);
    std::vector<PartTensor> tensors = {
        {.name = "t\n", .data = bad.data(), .dtype = dtype, .shape = {static_cast<std::int64_t>(elements)}}};
    Part part;
    std::optional<NonFinite> finding;
    const Status refused = write(temp, tensors, &part, &finding);
    EXPECT_FALSE(refused.ok());
    ASSERT_TRUE(finding.has_value());
    EXPECT_EQ(finding->index, static_cast<std::int64_t>(at));
    EXPECT_EQ(refused.message(), "t\\x0a[" + std::to_string(at) + "] is NaN");
    EXPECT_EQ(part.ByteSizeLong(), 0u);

    // What was allowed when it was written, and is not when it is read.
    tensors[0].must_be_finite = false;
    part = write_clean(temp, tensors);
    EXPECT_TRUE(part.tensors(0).may_be_non_finite());
    const XXH128_hash_t digest = XXH3_128bits(bad.data(), bad.size());
    EXPECT_EQ(part.tensors(0).digest_low(), digest.low64);
    PartReader reader;
    ASSERT_TRUE(reader.open(real_file_system(), temp.path(), part).ok());
    EXPECT_TRUE(reader.check_tensor(0, &finding).ok());
    part.mutable_tensors(0)->clear_may_be_non_finite();
    ASSERT_TRUE(reader.open(real_file_system(), temp.path(), part).ok());
    std::vector<std::byte> to(bad.size());
    for (const bool kept : {true, false}) {
      EXPECT_FALSE((kept ? reader.read_tensor(0, to, &finding) : reader.check_tensor(0, &finding)).ok());
      ASSERT_TRUE(finding.has_value());
      const std::int64_t parts = dtype == DType::kComplex128 ? 2 : 1;
      EXPECT_EQ(finding->index, static_cast<std::int64_t>(at) * parts);
    }
    EXPECT_EQ(std::memcmp(to.data(), bad.data(), to.size()), 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, LargePart,
                         ::testing::Values(DType::kFloat64, DType::kFloat32, DType::kBFloat16,
                                           DType::kFloat8E5M2, DType::kComplex64, DType::kComplex128),
                         [](const auto& of) { return std::string(dtype_name(of.param)); });

TEST(PartFile, NamesTheClassOfTheFirstBadValue) {
  const TempDir temp;
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (const auto& [bad, name] : {std::pair{kInf, "+Inf"}, {-kInf, "-Inf"}, {std::nanf(""), "NaN"}}) {
    const std::vector<float> values = {0, bad, -bad, std::nanf("")};
    Part part;
    std::optional<NonFinite> finding;
    EXPECT_FALSE(write(temp, {{.name = "w", .data = values.data(), .shape = {4}}}, &part, &finding).ok());
    ASSERT_TRUE(finding.has_value());
    EXPECT_EQ(finding->to_string(), std::string("w[1] is ") + name);
  }
}

TEST(PartFile, NamesTheTensorAmongOthers) {
  const TempDir temp;
  const std::vector<double> fine = {1, 2};
  const std::vector<float> bad = {1, std::nanf("")};
  const std::vector<PartTensor> tensors = {
      {.name = "first", .data = fine.data(), .dtype = DType::kFloat64, .shape = {2}},
      {.name = "second", .data = bad.data(), .shape = {2}}};
  Part part;
  std::optional<NonFinite> finding;
  EXPECT_FALSE(write(temp, tensors, &part, &finding).ok());
  EXPECT_EQ(finding.value().tensor, "second");
  EXPECT_EQ(finding.value().index, 1);
}

TEST(PartFile, OfWhichOneByteIsAnotherIsDamagedAndNotNonFinite) {
  const TempDir temp;
  const std::vector<float> values = {1, 2, 3};
  const Part part = write_clean(temp, {{.name = "a", .data = values.data(), .shape = {3}}});
  const std::string whole = read_file(temp / part.file());
  std::string damaged = whole;
  damaged.replace(damaged.size() - 4, 4, "\xff\xff\xff\xff");  // a NaN
  write_file(temp / part.file(), damaged);
  PartReader reader;
  ASSERT_TRUE(reader.open(real_file_system(), temp.path(), part).ok());
  std::optional<NonFinite> finding = NonFinite();
  const Status status = reader.check_tensor(0, &finding);
  EXPECT_NE(status.message().find("\"a\" is not what was written"), std::string::npos) << status.message();
  EXPECT_FALSE(finding.has_value());
}

TEST(PartFile, OfWhichTheHeaderIsNotWhatTheManifestSaysIsRefused) {
  const TempDir temp;
  const std::vector<float> values = {1, 2, 3};
  const Part part = write_clean(temp, {{.name = "a", .data = values.data(), .shape = {3}}});
  PartReader reader;
  const auto refused = [&](const Part& other) {
    bool size_is_right = false;
    const Status status = reader.open(real_file_system(), temp.path(), other, &size_is_right);
    EXPECT_EQ(size_is_right, other.file_bytes() == part.file_bytes());
    std::optional<NonFinite> finding;
    if (other.tensors_size() > 0) {
      EXPECT_FALSE(reader.check_tensor(0, &finding).ok()) << "of a part that is not open";
    }
    return !status.ok();
  };
  Part other = part;
  other.mutable_tensors(0)->set_name("b");
  EXPECT_TRUE(refused(other));
  other = part;
  other.mutable_tensors(0)->set_dtype("I32");
  EXPECT_TRUE(refused(other));
  other = part;
  other.mutable_tensors(0)->add_shape(1);
  EXPECT_TRUE(refused(other));
  other = part;
  other.clear_tensors();
  EXPECT_TRUE(refused(other));
  other = part;
  other.set_file_bytes(part.file_bytes() + 1);
  EXPECT_TRUE(refused(other));
  other = part;
  (*other.mutable_header_sha256())[0] ^= 1;
  EXPECT_TRUE(refused(other));
  // The digest's two halves count.
  for (const bool high : {true, false}) {
    other = part;
    TensorEntry* entry = other.mutable_tensors(0);
    high ? entry->set_digest_high(entry->digest_high() ^ 1) : entry->set_digest_low(entry->digest_low() ^ 1);
    ASSERT_TRUE(reader.open(real_file_system(), temp.path(), other).ok());
    std::optional<NonFinite> finding;
    EXPECT_FALSE(reader.check_tensor(0, &finding).ok());
  }
}

TEST(PartFile, MemoryOfAnotherSizeIsRefused) {
  const TempDir temp;
  const std::vector<float> values = {1, 2, 3};
  const Part part = write_clean(temp, {{.name = "a", .data = values.data(), .shape = {3}}});
  PartReader reader;
  ASSERT_TRUE(reader.open(real_file_system(), temp.path(), part).ok());
  std::vector<std::byte> small(11);
  std::optional<NonFinite> finding;
  EXPECT_FALSE(reader.read_tensor(0, small, &finding).ok());
}

TEST(PartFile, ShardsOfComplex128CountStoredElements) {
  const std::vector<std::complex<double>> values(3);
  TensorEntry entry;
  ASSERT_TRUE(describe({.name = "c",
                        .data = values.data(),
                        .dtype = DType::kComplex128,
                        .shape = {3},
                        .sharded = true,
                        .shard_offset = 3,
                        .shard_total = 9},
                       &entry)
                  .ok());
  EXPECT_EQ(entry.shard_offset(), 6u);
  EXPECT_EQ(entry.shard_total(), 18u);
  EXPECT_EQ(entry.bytes(), 48u);
}

TEST(PartFile, WhatCannotBeKeptIsNotDescribed) {
  TensorEntry entry;
  EXPECT_EQ(describe({.name = "a", .dtype = static_cast<DType>(99), .shape = {1}}, &entry).code(),
            StatusCode::kUsage);
  EXPECT_EQ(describe({.name = "a", .shape = {-1}}, &entry).code(), StatusCode::kUsage);
  EXPECT_EQ(describe({.name = "a", .shape = {1ll << 40, 1ll << 40}}, &entry).code(), StatusCode::kUsage);
}

TEST(PartFile, AFileOfThatNameIsNotOverwritten) {
  const TempDir temp;
  write_file(temp / part_file_name(3), "theirs");
  Part part;
  std::optional<NonFinite> finding;
  EXPECT_FALSE(write_part(real_file_system(), temp.path(), 3, {}, &part, &finding).ok());
  EXPECT_EQ(read_file(temp / part_file_name(3)), "theirs");
}

}  // namespace
}  // namespace holdfast
