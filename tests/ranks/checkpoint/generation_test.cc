#include "holdfast/checkpoint/generation.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "ranks/checkpoint/sample_generation.h"

namespace holdfast {
namespace {

class Generation : public ::testing::Test {
 protected:
  void SetUp() override { sample_.write(checkpoints_); }

  GenerationReport verify() { return verify_generation(real_file_system(), checkpoints_, sample_.id); }
  std::string path(const std::string& name) const {
    return checkpoints_ + "/" + sample_.id.name() + "/" + name;
  }

  // The report's only fault, which holds `why`.
  void expect_fault(const GenerationReport& report, const std::string& why) {
    EXPECT_FALSE(report.clean());
    ASSERT_EQ(report.faults.size(), 1u) << ::testing::PrintToString(report.faults);
    EXPECT_NE(report.faults[0].find(why), std::string::npos) << report.faults[0];
  }

  TempDir temp_;
  const std::string checkpoints_ = checkpoints_path(temp_.path());
  SampleGeneration sample_;
};

TEST_F(Generation, ThatIsAsItWasWrittenIsClean) {
  const GenerationReport report = verify();
  EXPECT_TRUE(report.clean()) << ::testing::PrintToString(report.faults);
  EXPECT_EQ(report.id, sample_.id);
  EXPECT_TRUE(report.faults.empty() && report.strangers.empty());
  std::uint64_t bytes = 0;
  for (const auto& [name, content] : files_of(path(""))) bytes += name == kManifestName ? 0 : content.size();
  EXPECT_EQ(report.bytes, bytes);
}

TEST_F(Generation, AnInspectionLooksAtSizesAndNotAtBytes) {
  GenerationReport report = inspect_generation(real_file_system(), checkpoints_, sample_.id);
  EXPECT_TRUE(report.complete);
  EXPECT_FALSE(report.whole || report.finite);
  std::string bytes = read_file(path("rank-00000.safetensors"));
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  write_file(path("rank-00000.safetensors"), bytes);
  EXPECT_TRUE(inspect_generation(real_file_system(), checkpoints_, sample_.id).complete);
  write_file(path("rank-00000.safetensors"), bytes + "x");
  EXPECT_FALSE(inspect_generation(real_file_system(), checkpoints_, sample_.id).complete);
}

TEST_F(Generation, OfWhichAnyFileIsCutAnywhereIsRefused) {
  const auto files = files_of(path(""));
  ASSERT_EQ(files.size(), 4u);
  for (const auto& [name, content] : files) {
    for (std::size_t n = 0; n < content.size(); ++n) {
      write_file(path(name), content.substr(0, n));
      const GenerationReport report = verify();
      ASSERT_FALSE(report.complete || report.whole || report.finite) << name << " cut at " << n;
      ASSERT_EQ(report.faults.size(), 1u);
      ASSERT_NE(report.faults[0].find(name), std::string::npos) << report.faults[0];
    }
    write_file(path(name), content + std::string(1, '\0'));
    ASSERT_FALSE(verify().complete) << name << " and one byte more";
    write_file(path(name), content);
  }
  EXPECT_TRUE(verify().clean());
}

TEST_F(Generation, OfWhichAnyBitOfAnyFileIsFlippedIsRefused) {
  std::size_t flipped = 0;
  for (const auto& [name, content] : files_of(path(""))) {
    std::fstream file(path(name), std::ios::binary | std::ios::in | std::ios::out);
    const auto put = [&](std::size_t at, char byte) {
      file.seekp(static_cast<std::streamoff>(at)).put(byte).flush();
      ASSERT_TRUE(file.good());
    };
    for (std::size_t bit = 0; bit < 8 * content.size(); ++bit, ++flipped) {
      put(bit / 8, static_cast<char>(content[bit / 8] ^ (1 << bit % 8)));
      ASSERT_FALSE(verify().whole) << name << ", bit " << bit;
      put(bit / 8, content[bit / 8]);
    }
  }
  EXPECT_GT(flipped, 8000u);
  EXPECT_TRUE(verify().clean());
}

TEST_F(Generation, OfWhichAFileIsMissingOrIsNoFileIsRefused) {
  for (const auto& [name, content] : files_of(path(""))) {
    std::filesystem::remove(path(name));
    expect_fault(verify(), name);
    std::filesystem::create_directory(path(name));
    expect_fault(verify(), name);
    std::filesystem::remove(path(name));
    write_file(temp_ / "elsewhere", content);
    std::filesystem::create_symlink(temp_ / "elsewhere", path(name));
    expect_fault(verify(), "symbolic link");
    std::filesystem::remove(path(name));
    write_file(path(name), content);
  }
  EXPECT_TRUE(verify().clean());
}

TEST_F(Generation, WithAPartThatIsNotInTheManifestIsRefusedAndOtherFilesAreOnlyNamed) {
  write_file(path("notes\x1b.txt"), "mine");
  GenerationReport report = verify();
  EXPECT_TRUE(report.clean());
  EXPECT_EQ(report.strangers, std::vector<std::string>{"notes\\x1b.txt"});
  write_file(path("rank-00002.safetensors"), read_file(path("rank-00001.safetensors")));
  report = verify();
  EXPECT_FALSE(report.complete);
  expect_fault(report, "rank-00002.safetensors is not in the manifest");
}

TEST_F(Generation, WithFilesOfAnotherGenerationIsRefused) {
  SampleGeneration other;
  other.id.attempt = 900;
  other.weight[0] = 1.5f;
  other.moment[0] = 0.75;
  other.write(checkpoints_);
  const auto mine = files_of(path(""));
  for (const auto& [name, content] : files_of(checkpoints_ + "/" + other.id.name())) {
    write_file(path(name), content);
    expect_fault(verify(), name == kManifestName ? "is of another generation, e0001-a0000000900"
                                                 : "is not what was written");
    write_file(path(name), mine.at(name));
  }
  // Two parts of one generation, of the same size and names.
  write_file(path("rank-00000.safetensors"), mine.at("rank-00001.safetensors"));
  EXPECT_TRUE(verify().clean()) << "the two ranks hold the same bytes";
}

// Written by who does not scan: the digests are right, and so is the manifest.
TEST_F(Generation, WithAValueThatIsNotFiniteIsWholeAndNotClean) {
  sample_.id.attempt = 1200;
  sample_.weight[1] = std::numeric_limits<float>::quiet_NaN();
  FileSystem& files = real_file_system();
  const std::string folder = checkpoints_ + "/" + sample_.id.name();
  ASSERT_TRUE(files.create_folder(folder).ok());
  std::vector<PartTensor> tensors = sample_.replicated();
  tensors[0].must_be_finite = false;
  Manifest manifest;
  ASSERT_TRUE(read_manifest(files, checkpoints_, {1, 600}, &manifest).ok());
  manifest.set_attempt(1200);
  manifest.clear_parts();
  std::optional<NonFinite> finding;
  ASSERT_TRUE(write_part(files, folder, -1, tensors, manifest.add_parts(), &finding).ok());
  manifest.mutable_parts(0)->mutable_tensors(0)->clear_may_be_non_finite();
  write_file(folder + "/manifest.pb", encode_manifest(manifest));
  const GenerationReport report = verify();
  EXPECT_TRUE(report.complete && report.whole);
  EXPECT_FALSE(report.finite);
  expect_fault(report, "replicated.safetensors: conv1.weight[1] is NaN");
}

TEST_F(Generation, FaultsAreCapped) {
  Manifest manifest;
  ASSERT_TRUE(read_manifest(real_file_system(), checkpoints_, sample_.id, &manifest).ok());
  for (int i = 0; i < 100; ++i) write_file(path("x" + std::to_string(i) + ".safetensors"), "");
  const GenerationReport report = verify();
  EXPECT_EQ(report.faults.size(), 32u);
  EXPECT_EQ(report.faults.back(), "and more");
}

TEST(GenerationName, IsReadOnlyAsItIsWritten) {
  EXPECT_EQ((GenerationId{1, 600}).name(), "e0001-a0000000600");
  EXPECT_EQ((GenerationId{12345, 12345678901}).name(), "e12345-a12345678901");
  for (const GenerationId id : {GenerationId{0, 0}, GenerationId{1, 600}, GenerationId{12345, 12345678901},
                                GenerationId{~0ull, ~0ull}}) {
    GenerationId parsed;
    ASSERT_TRUE(parse_generation_name(id.name(), &parsed)) << id.name();
    EXPECT_EQ(parsed, id);
  }
  for (const char* name :
       {"", "e", "e0001", "e0001-a", "e1-a600", "e0001-a600", "e0001-a0000000600 ", " e0001-a0000000600",
        "e00001-a0000000600", "e0001-a00000000600", "e-001-a0000000600", "e0001-a000000060x",
        ".e0001-a0000000600.partial", "e0001_a0000000600", "E0001-a0000000600", "e0001-a0000000600.2",
        "e18446744073709551616-a0000000600", "e0001-a99999999999999999999999"}) {
    GenerationId id{7, 7};
    EXPECT_FALSE(parse_generation_name(name, &id)) << name;
    EXPECT_EQ(id, (GenerationId{7, 7}));
  }
}

TEST(GenerationList, IsOldestFirstAndPassesOverWhatIsNone) {
  const TempDir temp;
  std::vector<GenerationId> found = {{9, 9}};
  ASSERT_TRUE(list_generations(real_file_system(), temp / "none", &found).ok());
  EXPECT_TRUE(found.empty());
  for (const char* name : {"e0002-a0000000100", "e0001-a0000000900", "e10000-a0000000001",
                           ".e0003-a0000000001.partial", "set-aside", "e0002-a0000000100.2"}) {
    std::filesystem::create_directory(temp / name);
  }
  ASSERT_TRUE(list_generations(real_file_system(), temp.path(), &found).ok());
  EXPECT_EQ(found, (std::vector<GenerationId>{{1, 900}, {2, 100}, {10000, 1}}));
}

}  // namespace
}  // namespace holdfast
