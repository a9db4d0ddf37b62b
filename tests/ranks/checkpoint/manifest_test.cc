#include <gtest/gtest.h>

#include <functional>

#include "checkpoint/manifest_limits.h"
#include "holdfast/coord/storage/sha256.h"
#include "ranks/checkpoint/sample_generation.h"

namespace holdfast {
namespace {

Manifest sample() {
  const TempDir temp;
  const SampleGeneration generation;
  generation.write(temp / "checkpoints");
  Manifest manifest;
  EXPECT_TRUE(read_manifest(real_file_system(), temp / "checkpoints", generation.id, &manifest).ok());
  return manifest;
}

// A file with a payload that need not be a manifest, under a right digest.
std::string file_of(const std::string& payload) {
  ManifestFile file;
  file.set_version(1);
  file.set_payload(payload);
  file.set_sha256(sha256(payload));
  return file.SerializeAsString();
}

void expect_refused(const std::string& bytes, const std::string& why) {
  Manifest manifest;
  manifest.set_epoch(7);
  const Status status = decode_manifest(bytes, &manifest);
  EXPECT_EQ(status.code(), StatusCode::kInternal) << why;
  EXPECT_NE(status.message().find(why), std::string::npos) << status.message();
  EXPECT_EQ(manifest.ByteSizeLong(), 0u) << "a part of what was refused";
}

TEST(Manifest, ReadsBackAsItWasWritten) {
  const Manifest manifest = sample();
  ASSERT_EQ(manifest.parts_size(), 3);
  EXPECT_EQ(manifest.memory(), "memory\xff");
  EXPECT_EQ(manifest.update(), 590u);
  EXPECT_EQ(manifest.parts(0).file(), "replicated.safetensors");
  EXPECT_FALSE(manifest.parts(0).has_rank());
  EXPECT_EQ(manifest.parts(2).rank(), 1);
  EXPECT_EQ(encode_manifest(manifest), file_of(manifest.SerializeAsString()));
}

TEST(Manifest, OfWhichAnyBitIsFlippedOrThatIsCutAnywhereIsRefused) {
  const std::string whole = encode_manifest(sample());
  Manifest manifest;
  for (std::size_t n = 0; n < whole.size(); ++n)
    EXPECT_FALSE(decode_manifest(whole.substr(0, n), &manifest).ok()) << n;
  for (std::size_t bit = 0; bit < 8 * whole.size(); ++bit) {
    std::string damaged = whole;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1 << bit % 8));
    EXPECT_FALSE(decode_manifest(damaged, &manifest).ok()) << bit;
  }
  EXPECT_TRUE(decode_manifest(whole, &manifest).ok());
}

TEST(Manifest, WithBytesThatProtobufWouldOverlookIsRefused) {
  const std::string whole = encode_manifest(sample());
  expect_refused(whole + "\x20\x01", "it is none");  // a field 4
  expect_refused("\x08\x01" + whole, "it is none");  // the version twice
  const std::string payload = sample().SerializeAsString();
  expect_refused(file_of(payload + "\xa0\x06\x01"), "does not belong");  // a field 100
  expect_refused(file_of("\x08\x01" + payload), "does not belong");      // the epoch twice
  expect_refused(file_of(payload + std::string("\x10\xd8\x84\x80\0", 5)),
                 "does not belong");  // and the attempt, in five
}

TEST(Manifest, OfAnotherVersionSaysSo) {
  ManifestFile file;
  ASSERT_TRUE(file.ParseFromString(encode_manifest(sample())));
  file.set_version(2);
  expect_refused(file.SerializeAsString(), "of version 2; this program reads version 1");
  file.clear_version();
  expect_refused(file.SerializeAsString(), "none");
}

TEST(Manifest, ThatSaysWhatCannotBeIsRefused) {
  struct Case {
    std::string why;
    std::function<void(Manifest*)> damage;
  };
  const auto tensor = [](Manifest* m, int part, int i) { return m->mutable_parts(part)->mutable_tensors(i); };
  const std::vector<Case> cases = {
      {"where the run was", [](Manifest* m) { m->clear_epoch(); }},
      {"where the run was", [](Manifest* m) { m->clear_attempt(); }},
      {"where the run was", [](Manifest* m) { m->clear_update(); }},
      {"where the run was", [](Manifest* m) { m->clear_skips(); }},
      {"number of ranks", [](Manifest* m) { m->clear_ranks(); }},
      {"number of ranks", [](Manifest* m) { m->set_ranks((1 << 20) + 1); }},
      {"is no part", [](Manifest* m) { m->set_ranks(1); }},
      {"is no part", [](Manifest* m) { m->mutable_parts(1)->set_file("../rank-00000.safetensors"); }},
      {"is no part", [](Manifest* m) { m->mutable_parts(1)->set_file("rank-0.safetensors"); }},
      {"is no part", [](Manifest* m) { m->mutable_parts(1)->set_file("rank-00001.safetensors"); }},
      {"is no part",
       [](Manifest* m) { m->mutable_parts(0)->set_file(std::string("replicated.safetensors\0", 23)); }},
      {"is no part", [](Manifest* m) { m->mutable_parts(0)->set_rank(-1); }},
      {"disorder", [](Manifest* m) { m->mutable_parts()->SwapElements(1, 2); }},
      {"disorder", [](Manifest* m) { *m->mutable_parts(2) = m->parts(1); }},
      {"disorder", [](Manifest* m) { *m->mutable_parts(1) = m->parts(0); }},
      {"digest of its header", [](Manifest* m) { m->mutable_parts(0)->clear_header_sha256(); }},
      {"digest of its header", [](Manifest* m) { m->mutable_parts(0)->mutable_header_sha256()->pop_back(); }},
      {"another size than its tensors", [](Manifest* m) { m->mutable_parts(0)->set_file_bytes(29); }},
      {"another size than its tensors",
       [](Manifest* m) { m->mutable_parts(0)->set_file_bytes(100'000'029); }},
      {"another size than its tensors", [](Manifest* m) { m->mutable_parts(0)->clear_file_bytes(); }},
      {"name that is none", [&](Manifest* m) { tensor(m, 0, 0)->clear_name(); }},
      {"name that is none", [&](Manifest* m) { tensor(m, 0, 0)->set_name(std::string(4097, 'x')); }},
      {"name that is none", [&](Manifest* m) { tensor(m, 0, 0)->set_name("\xff"); }},
      {"name that is none", [&](Manifest* m) { tensor(m, 0, 0)->set_name("__metadata__"); }},
      {"there twice", [&](Manifest* m) { tensor(m, 0, 1)->set_name("conv1.weight"); }},
      {"there twice", [&](Manifest* m) { tensor(m, 1, 0)->set_name("conv1.weight"); }},
      {"not told in full", [&](Manifest* m) { tensor(m, 0, 0)->clear_begin(); }},
      {"not told in full", [&](Manifest* m) { tensor(m, 0, 0)->clear_digest_low(); }},
      {"not told in full", [&](Manifest* m) { tensor(m, 0, 0)->clear_digest_high(); }},
      {"unknown dtype", [&](Manifest* m) { tensor(m, 0, 0)->set_dtype("U64"); }},
      {"too many dimensions",
       [&](Manifest* m) {
         for (int i = 0; i < 63; ++i) tensor(m, 0, 0)->add_shape(1);
       }},
      {"size that overflows", [&](Manifest* m) { tensor(m, 0, 0)->set_shape(0, 1ull << 62); }},
      {"size that overflows", [&](Manifest* m) { tensor(m, 0, 0)->set_shape(0, ~0ull); }},
      {"does not follow", [&](Manifest* m) { tensor(m, 0, 0)->set_begin(4); }},
      {"does not follow", [&](Manifest* m) { tensor(m, 0, 1)->set_begin(8); }},
      {"another size than its dtype", [&](Manifest* m) { tensor(m, 0, 1)->set_bytes(12); }},
      {"another size than its dtype", [&](Manifest* m) { tensor(m, 0, 0)->set_shape(0, 4); }},
      {"neither a tensor nor bytes", [&](Manifest* m) { tensor(m, 0, 0)->set_is_bytes(true); }},
      {"half of a shard", [&](Manifest* m) { tensor(m, 1, 0)->clear_shard_offset(); }},
      {"half of a shard", [&](Manifest* m) { tensor(m, 1, 0)->clear_shard_total(); }},
      {"shard outside", [&](Manifest* m) { tensor(m, 1, 0)->set_shard_offset(3); }},
      {"shard outside", [&](Manifest* m) { tensor(m, 1, 0)->set_shard_offset(~0ull); }},
      {"shard outside", [&](Manifest* m) { tensor(m, 1, 0)->set_shard_total(~0ull); }},
      {"of no rank",
       [&](Manifest* m) {
         tensor(m, 0, 0)->set_shard_offset(0);
         tensor(m, 0, 0)->set_shard_total(3);
       }},
  };
  for (std::size_t i = 0; i < cases.size(); ++i) {
    SCOPED_TRACE(i);
    Manifest manifest = sample();
    cases[i].damage(&manifest);
    expect_refused(encode_manifest(manifest), cases[i].why);
  }
}

TEST(Manifest, NamesInAMessageAreEscaped) {
  Manifest manifest = sample();
  manifest.mutable_parts(0)->set_file("\x1b[2J");
  expect_refused(encode_manifest(manifest), "\\x1b[2J");
}

// Two bytes for each of what takes a hundred in memory: refused before any of it is allocated.
TEST(Manifest, OfMorePartsTensorsOrFieldsThanThereCanBeIsRefused) {
  const auto many = [](const std::string& what, std::size_t n) {
    std::string all;
    for (std::size_t i = 0; i < n; ++i) all += what;
    return all;
  };
  const auto part_of = [](const std::string& tensors) {
    std::string part = "\x4a";
    for (std::size_t n = tensors.size(); n > 0 || part.size() == 1; n >>= 7) {
      part += static_cast<char>((n & 0x7f) | (n > 0x7f ? 0x80 : 0));
    }
    return part + tensors;
  };
  expect_refused(file_of(many(std::string("\x4a\0", 2), kMostManifestRanks + 2)), "too large");
  expect_refused(file_of(part_of(many(std::string("\x2a\0", 2), kMostManifestTensors + 1))), "too large");
  expect_refused(file_of(many(std::string("\x08\0", 2), kMostManifestFields + 1)), "too large");
  expect_refused(many(std::string("\x08\1", 2), 4), "none");
  // A shape whose numbers take a byte each, and a group.
  expect_refused(file_of(part_of(std::string("\x2a\x04\x1a\x02\x01\x01", 6))), "too large");
  expect_refused(file_of("\xa3\x06\xa4\x06"), "too large");
  expect_refused(std::string(kLargestManifest + 1, '\0'), "256 MB");
}

}  // namespace
}  // namespace holdfast
