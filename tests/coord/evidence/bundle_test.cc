// A bundle is hostile until checked: whatever was changed in it is noticed, and nothing outside of it is
// touched.
#include "holdfast/coord/evidence/bundle.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <set>

#include "coord/evidence/sample_bundle.h"
#include "evidence/bundle_file.h"
#include "holdfast/coord/storage/sha256.h"

namespace holdfast {
namespace {

const std::string kName = "e0001-a0000001842";
const std::vector<std::string> kFiles = {"manifest.json",          "manifest.pb", "rank-00002.safetensors",
                                         "rank-00007.safetensors", "report.json", "report.md"};

class BundleTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const BundleOutcome outcome = submit_and_wait(*open_store(temp_.path()), sample_about(), sample_parts());
    ASSERT_TRUE(outcome.published) << outcome.reason;
    ASSERT_EQ(fault(), "");
  }
  std::string fault() const { return fault_of_bundle(path_); }
  std::string file(const std::string& name) const { return path_ + "/" + name; }

  // Writes a manifest that was changed and has a right content id; gives what is found to be wrong.
  std::string fault_with(const std::function<void(BundleManifest*)>& change) {
    BundleFile file_was;
    BundleManifest manifest;
    const std::string bytes = read_file(file("manifest.pb"));
    EXPECT_TRUE(decode_bundle(bytes, &file_was, &manifest).ok());
    change(&manifest);
    BundleFile changed = bundle_file(manifest);
    *changed.mutable_files() = file_was.files();
    write_file(file("manifest.pb"), encode_bundle(changed));
    std::string found = fault();
    write_file(file("manifest.pb"), bytes);
    return found;
  }

  TempDir temp_;
  const std::string path_ = temp_ / kName;
};

bool holds(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// A small one: one rank, two tensors, little else.
TEST(BundleBitsTest, AnyFlippedBitOfAnyFileIsFound) {
  TempDir temp;
  BundleManifest about = sample_about();
  about.mutable_origins()->DeleteSubrange(0, 1);
  EvidencePart part = sample_part(7);
  part.mutable_tensors()->DeleteSubrange(2, 2);
  ASSERT_TRUE(submit_and_wait(*open_store(temp.path()), about, {part}).published);
  const std::string path = temp / kName;
  std::size_t bits = 0;
  for (const std::string& name : kFiles) {
    const std::string file = path + "/" + name;
    if (!std::filesystem::exists(file)) continue;
    const std::string whole = read_file(file);
    // In place: a file that is made shorter and written again is flushed to the disk each time.
    std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
    const auto put = [&](std::size_t at, int byte) {
      stream.seekp(static_cast<std::streamoff>(at)).put(static_cast<char>(byte)).flush();
    };
    // What is parsed bit by bit; of the texts, which all are under one digest, some.
    const bool parsed = name.ends_with(".pb") || name.ends_with(".safetensors");
    for (std::size_t bit = 0; bit < 8 * whole.size(); bit += parsed ? 1 : 37, ++bits) {
      put(bit / 8, whole[bit / 8] ^ (1 << bit % 8));
      ASSERT_NE(fault_of_bundle(path), "") << name << " bit " << bit;
      put(bit / 8, whole[bit / 8]);
    }
  }
  EXPECT_EQ(fault_of_bundle(path), "");
  EXPECT_GT(bits, 8'000u);
}

TEST_F(BundleTest, AFileThatIsShorterLongerEmptyOrMissingIsFound) {
  for (const std::string& name : kFiles) {
    SCOPED_TRACE(name);
    const std::string whole = read_file(file(name));
    for (const std::string& other : {whole.substr(0, whole.size() - 1), whole + '\0', std::string()}) {
      write_file(file(name), other);
      EXPECT_NE(fault(), "");
    }
    std::filesystem::remove(file(name));
    EXPECT_NE(fault(), "");
    write_file(file(name), whole);
  }
  EXPECT_EQ(fault(), "");
}

TEST_F(BundleTest, ALinkInPlaceOfAFileOrTheFolderIsRefused) {
  for (const std::string& name : kFiles) {
    SCOPED_TRACE(name);
    std::filesystem::rename(file(name), temp_ / "moved");
    std::filesystem::create_symlink(temp_ / "moved", file(name));
    EXPECT_NE(fault(), "");
    std::filesystem::remove(file(name));
    std::filesystem::rename(temp_ / "moved", file(name));
  }
  ASSERT_EQ(fault(), "");
  std::filesystem::create_symlink(path_, temp_ / "link");
  EXPECT_EQ(fault_of_bundle(temp_ / "link"), temp_ / "link is no folder");
}

TEST_F(BundleTest, AFileThatIsNoneOfItsOwnIsFoundAndAnExperimentLogIsFine) {
  write_file(file("experiments.jsonl"), "{}\n");
  EXPECT_EQ(fault(), "");
  write_file(file("\x1b[2J"), "");
  EXPECT_EQ(fault(), path_ + "/\\x1b[2J is not in the manifest");
  std::filesystem::remove(file("\x1b[2J"));
  write_file(file("rank-00001.safetensors"), "");
  EXPECT_EQ(fault(), path_ + "/rank-00001.safetensors is not in the manifest");
  std::filesystem::remove(file("rank-00001.safetensors"));
  std::filesystem::remove(file("experiments.jsonl"));
  std::filesystem::create_symlink("/etc/passwd", file("experiments.jsonl"));
  EXPECT_EQ(fault(), path_ + "/experiments.jsonl is not in the manifest");
}

TEST_F(BundleTest, OneThatWasMovedIsReadAndOneWithAnothersNameIsNot) {
  std::filesystem::rename(path_, temp_ / "from the cluster");
  EXPECT_EQ(fault_of_bundle(temp_ / "from the cluster"), "");
  std::filesystem::rename(temp_ / "from the cluster", temp_ / "e0001-a0000001843");
  EXPECT_EQ(fault_of_bundle(temp_ / "e0001-a0000001843/"),
            temp_ / "e0001-a0000001843/ is of another incident, e0001-a0000001842");
}

TEST_F(BundleTest, AManifestThatLeadsElsewhereIsRefusedThoughItsIdIsRight) {
  struct Case {
    std::string fault;
    std::function<void(BundleManifest*)> change;
  };
  const auto tensor = [](BundleManifest* manifest) { return manifest->mutable_parts(0)->mutable_tensors(0); };
  const std::vector<Case> cases = {
      {"is in another file", [&](auto* m) { tensor(m)->set_file("../../x"); }},
      {"is in another file", [&](auto* m) { tensor(m)->set_file("rank-00007.safetensors"); }},
      {"does not tell the digest of", [](auto* m) { m->mutable_files(0)->set_name("/etc/passwd"); }},
      {"does not tell the digest of", [](auto* m) { m->mutable_files(0)->set_value("00"); }},
      {"does not tell the digest of", [](auto* m) { m->mutable_files()->RemoveLast(); }},
      {"has a file without tensors: \"../x\"", [](auto* m) { m->add_files()->set_name("../x"); }},
      {"has an unknown dtype", [&](auto* m) { tensor(m)->set_dtype("F31"); }},
      {"has a size that overflows", [&](auto* m) { tensor(m)->add_shape(std::uint64_t{1} << 63); }},
      {"has another size than its dtype", [&](auto* m) { tensor(m)->set_bytes(1); }},
      {"does not follow the one before it", [&](auto* m) { tensor(m)->set_begin(1); }},
      {"is not told as it should be", [&](auto* m) { tensor(m)->set_data("x"); }},
      {"is not told as it should be", [&](auto* m) { tensor(m)->clear_digest_low(); }},
      {"of a micro-batch that cannot be", [&](auto* m) { tensor(m)->set_micro_batch(-2); }},
      {"header is not what the manifest says", [&](auto* m) { tensor(m)->set_name("another"); }},
      {"header is not what the manifest says",
       [](auto* m) { m->mutable_files(0)->set_value(std::string(64, '0')); }},
      {"a rank that the run did not have", [](auto* m) { m->mutable_parts(0)->set_rank(-1); }},
      {"a rank that the run did not have", [](auto* m) { m->mutable_parts(1)->set_rank(8); }},
      {"a rank that the run did not have", [](auto* m) { m->mutable_parts(1)->clear_rank(); }},
      {"its parts twice or in disorder", [](auto* m) { m->mutable_parts()->SwapElements(0, 1); }},
      {"number of ranks that cannot be", [](auto* m) { m->set_ranks(0); }},
      {"number of ranks that cannot be", [](auto* m) { m->set_ranks(std::uint64_t{1} << 40); }},
      {"does not say of which incident", [](auto* m) { m->clear_attempt(); }},
      {"is of another incident", [](auto* m) { m->set_attempt(1); }},
      {"has text that is no UTF-8", [](auto* m) { m->set_run("\xff"); }},
      {"has text that is no UTF-8", [](auto* m) { m->mutable_parts(0)->mutable_facts(0)->set_name("\xff"); }},
      {"has a stage that is none", [](auto* m) { m->set_stage(6); }},
      {"has a stage that is none", [](auto* m) { m->mutable_origins(0)->set_stage(-1); }},
      {"has a stage that is none", [](auto* m) { m->mutable_parts(0)->mutable_stages(0)->set_stage(6); }},
      {"has a stage that is none", [](auto* m) { m->mutable_parts(0)->add_layers()->set_stage(6); }},
      {"is compact and has tensors", [](auto* m) { m->set_compact(true); }},
  };
  for (const Case& one : cases) {
    const std::string found = fault_with(one.change);
    EXPECT_TRUE(holds(found, one.fault)) << one.fault << "\n" << found;
  }
  EXPECT_EQ(fault_with([](BundleManifest*) {}), "");
}

TEST_F(BundleTest, OtherVersionsFieldsTwiceAndUnknownFieldsAreRefused) {
  const std::string bytes = read_file(file("manifest.pb"));
  BundleFile as_written;
  ASSERT_TRUE(as_written.ParseFromString(bytes));
  const auto fault_of_bytes = [&](const std::string& other) {
    BundleFile read;
    BundleManifest manifest;
    const Status status = decode_bundle(other, &read, &manifest);
    EXPECT_TRUE(status.ok() || (manifest.ByteSizeLong() == 0 && read.ByteSizeLong() == 0));
    return status.message();
  };
  EXPECT_EQ(fault_of_bytes(bytes), "");
  BundleFile other = as_written;
  other.set_version(2);
  EXPECT_EQ(fault_of_bytes(encode_bundle(other)),
            "the manifest is of version 2; this program reads version 1");
  EXPECT_EQ(fault_of_bytes(""), "the manifest is damaged: it is none");
  EXPECT_EQ(fault_of_bytes(std::string("\x08\x01", 2) + bytes),
            "the manifest is damaged: it holds what does not belong there");
  EXPECT_EQ(fault_of_bytes(bytes + std::string("\x28\x01", 2)),
            "the manifest is damaged: it is none");  // field 5
  other = as_written;
  other.set_payload(as_written.payload() + std::string("\x88\x7d\x01", 3));  // field 2001
  EXPECT_EQ(fault_of_bytes(encode_bundle(other)), "the manifest is damaged: it is none, or too large");
  other = as_written;
  other.set_payload(as_written.payload() + std::string("\x08\x01", 2));  // the epoch, again
  EXPECT_EQ(fault_of_bytes(encode_bundle(other)),
            "the manifest is damaged: it holds what does not belong there");
  other = as_written;
  other.mutable_files(0)->set_name("../../manifest.json");
  EXPECT_TRUE(holds(fault_of_bytes(encode_bundle(other)), "has a file that is none of a bundle's"));
  other = as_written;
  *other.add_files() = as_written.files(0);
  EXPECT_TRUE(holds(fault_of_bytes(encode_bundle(other)), "has a file that is none of a bundle's"));
}

// A tensor's shape that claims a number for each of its bytes.
TEST_F(BundleTest, APackedShapeAndMessagesWithoutEndAreRefusedBeforeTheyTakeMemory) {
  BundleFile bomb;
  bomb.set_version(1);
  bomb.set_content_id(std::string(32, 'x'));
  std::string tensors;
  for (int i = 0; i < 1'100'000; ++i) tensors += std::string("\x22\x00", 2);  // parts.tensors, empty
  std::string part = "\xe2\x01";                                              // parts
  for (std::size_t size = tensors.size(); size > 0; size >>= 7) {
    part += static_cast<char>((size & 127) | (size > 127 ? 128 : 0));
  }
  bomb.set_payload(part + tensors);
  BundleFile read;
  BundleManifest manifest;
  EXPECT_EQ(decode_bundle(encode_bundle(bomb), &read, &manifest).message(),
            "the manifest is damaged: it is none, or too large");
  bomb.set_payload(std::string("\xe2\x01\x06\x22\x04\x22\x02\x01\x01", 9));  // parts.tensors.shape: [1, 1]
  EXPECT_EQ(decode_bundle(encode_bundle(bomb), &read, &manifest).message(),
            "the manifest is damaged: it is none, or too large");
}

TEST_F(BundleTest, ATensorOfAnotherBundleIsNotRead) {
  const auto bundle = open_bundle(path_);
  ASSERT_NE(bundle, nullptr);
  std::string bytes = "before";
  EvidenceTensor tensor = bundle->manifest().parts(0).tensors(0);
  tensor.set_file("../" + kName + "/manifest.pb");
  EXPECT_EQ(bundle->read(tensor, &bytes).message(), path_ + " has no such tensor: \"input\"");
  EXPECT_EQ(bytes, "");
  tensor = bundle->manifest().parts(0).tensors(0);
  tensor.set_bytes(17);
  EXPECT_FALSE(bundle->read(tensor, &bytes).ok());
}

TEST_F(BundleTest, ATensorThatChangedAfterOpeningIsNotRead) {
  const auto bundle = open_bundle(path_);
  ASSERT_NE(bundle, nullptr);
  const std::string name = file("rank-00002.safetensors");
  std::string whole = read_file(name);
  whole[whole.find("wwww")] = 'v';
  write_file(name, whole);
  std::string bytes;
  for (const EvidenceTensor& tensor : bundle->manifest().parts(0).tensors()) {
    EXPECT_EQ(bundle->read(tensor, &bytes).ok(), tensor.name() != "fc.weight");
  }
  EXPECT_EQ(bundle->verify(),
            std::vector<std::string>{name + " is damaged: \"fc.weight\" is not what was written"});
}

TEST_F(BundleTest, ManyFaultsAreCut) {
  for (int i = 0; i < 100; ++i) write_file(file("x" + std::to_string(i)), "");
  const std::vector<std::string> faults = open_bundle(path_)->verify();
  ASSERT_EQ(faults.size(), 32u);
  EXPECT_EQ(faults.back(), "and more");
}

}  // namespace
}  // namespace holdfast
