#include "holdfast/coord/evidence/evidence_store.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>

#include "coord/evidence/sample_bundle.h"
#include "holdfast/coord/storage/safetensors.h"

namespace holdfast {
namespace {

using Json = nlohmann::json;

const std::string kName = "e0001-a0000001842";

std::vector<std::string> names_in(const std::string& path) {
  std::vector<std::string> names;
  EXPECT_TRUE(real_file_system().list(path, &names).ok());
  return names;
}

std::uint64_t bytes_of(const std::string& path) {
  std::uint64_t bytes = 0;
  EXPECT_TRUE(tree_bytes(real_file_system(), path, &bytes).ok());
  return bytes;
}

// By "ROLE/NAME" of each tensor of rank 7.
std::map<std::string, std::string> tensors_of(const Bundle& bundle, int rank = 7) {
  std::map<std::string, std::string> found;
  for (const EvidencePart& part : bundle.manifest().parts()) {
    if (part.rank() != rank) continue;
    for (const EvidenceTensor& tensor : part.tensors()) {
      std::string bytes;
      EXPECT_TRUE(bundle.read(tensor, &bytes).ok());
      found[EvidenceTensor::Role_Name(tensor.role()) + "/" + tensor.name()] = bytes;
    }
  }
  return found;
}

class EvidenceStoreTest : public ::testing::Test {
 protected:
  BundleOutcome write(EvidenceStore& store, std::uint64_t attempt = 1842) {
    return submit_and_wait(store, sample_about(attempt), sample_parts());
  }
  std::string bundle_path(const std::string& name = kName) const { return incidents_ + "/" + name; }

  TempDir temp_;
  const std::string incidents_ = temp_ / "incidents";
  EvidenceOptions options_;
};

TEST_F(EvidenceStoreTest, WhatTwoRanksContributedIsReadBack) {
  auto store = open_store(incidents_);
  EXPECT_EQ(store->next().bytes, options_.bundle_quota_bytes);
  const BundleOutcome outcome = write(*store);
  ASSERT_TRUE(outcome.published) << outcome.reason;
  EXPECT_EQ(outcome.reason, "");
  EXPECT_EQ(outcome.id.name(), kName);
  EXPECT_FALSE(outcome.compact);
  EXPECT_EQ(outcome.bytes, bytes_of(bundle_path()));
  EXPECT_GE(outcome.seconds, 0);
  EXPECT_EQ(names_in(bundle_path()),
            (std::vector<std::string>{"manifest.json", "manifest.pb", "rank-00002.safetensors",
                                      "rank-00007.safetensors", "report.json", "report.md"}));
  const auto bundle = open_bundle(bundle_path());
  ASSERT_NE(bundle, nullptr);
  EXPECT_EQ(bundle->verify(), std::vector<std::string>());
  EXPECT_EQ(bundle->content_id(), outcome.content_id);
  ASSERT_EQ(bundle->manifest().parts_size(), 2);
  EXPECT_EQ(bundle->manifest().parts(0).rank(), 2);
  EXPECT_EQ(bundle->manifest().parts(1).facts(0).value(), "rank 7");
  EXPECT_EQ(bundle->manifest().origins(1).index(), 1u);
  for (const int rank : {2, 7}) {
    const auto tensors = tensors_of(*bundle, rank);
    ASSERT_EQ(tensors.size(), 4u);
    EXPECT_EQ(tensors.at("BATCH/input"), "0123456789abcdef");
    EXPECT_EQ(tensors.at("BATCH/targets"), "\x01\x02\x03");
    EXPECT_EQ(tensors.at("STATE/fc.weight"), std::string(32, 'w'));
    EXPECT_EQ(tensors.at("SEEN/fc"), std::string("\x80\x7f\xc0\x7f\x01\0\x02\0", 8));
  }
}

TEST_F(EvidenceStoreTest, TheTensorsAreSafetensorsWithUniqueNames) {
  std::vector<EvidencePart> parts = {sample_part(7)};
  *parts[0].add_tensors() = parts[0].tensors(0);                                           // the same again
  *parts[0].add_tensors() = sample_tensor(EvidenceTensor::SEEN, "a\xff", "U8", {1}, "x");  // no UTF-8
  *parts[0].add_tensors() = sample_tensor(EvidenceTensor::SEEN, "a\xfe", "U8", {1}, "y");
  *parts[0].add_tensors() = sample_tensor(EvidenceTensor::SEEN, "none", "I64", {0, 5}, "");
  *parts[0].add_tensors() = sample_tensor(EvidenceTensor::SEEN, "one", "F64", {}, "12345678");
  auto store = open_store(incidents_);
  ASSERT_TRUE(submit_and_wait(*store, sample_about(), parts).published);
  std::unique_ptr<ReadableFile> file;
  ASSERT_TRUE(real_file_system().open_file(bundle_path() + "/rank-00007.safetensors", &file).ok());
  SafetensorsHeader header;
  ASSERT_TRUE(read_safetensors_header(*file, &header).ok());
  std::vector<std::string> names;
  for (const SafetensorsEntry& entry : header.tensors) names.push_back(entry.name);
  EXPECT_EQ(names, (std::vector<std::string>{"seen/none", "seen/one", "batch.0/input", "state/fc.weight",
                                             "seen.0/fc", "batch.0/targets", "again.6/batch.0/targets",
                                             "seen/a\xef\xbf\xbd", "again.8/seen/a\xef\xbf\xbd"}));
  const auto bundle = open_bundle(bundle_path());
  ASSERT_NE(bundle, nullptr);
  const auto tensors = tensors_of(*bundle);
  EXPECT_EQ(tensors.at("SEEN/a\xff"), "x");
  EXPECT_EQ(tensors.at("SEEN/a\xfe"), "y");
  EXPECT_EQ(tensors.at("SEEN/none"), "");
  EXPECT_EQ(bundle->verify(), std::vector<std::string>());
}

TEST_F(EvidenceStoreTest, WhatARankDidNotEvenSendIsSaid) {
  std::vector<EvidencePart> parts = {sample_part(7)};
  for (const std::uint64_t bytes : {77u, 3u}) {
    Omitted* omitted = parts[0].add_omitted();
    omitted->set_what("images");
    omitted->set_bytes(bytes);
    omitted->set_why("quota");
  }
  auto store = open_store(incidents_);
  const BundleOutcome outcome = submit_and_wait(*store, sample_about(), parts);
  EXPECT_TRUE(outcome.published);
  EXPECT_EQ(outcome.reason, "2 tensors of 80 bytes left out: quota");
}

TEST_F(EvidenceStoreTest, WhatIsNoTensorIsLeftOutAndSaid) {
  std::vector<EvidencePart> parts = {sample_part(7)};
  *parts[0].add_tensors() = sample_tensor(EvidenceTensor::SEEN, "odd", "C128", {1}, std::string(16, 'c'));
  *parts[0].add_tensors() = sample_tensor(EvidenceTensor::SEEN, "short", "F32", {2}, "1234");
  *parts[0].add_tensors() =
      sample_tensor(EvidenceTensor::SEEN, "huge", "F32", {std::uint64_t{1} << 63, 4}, "1234");
  auto store = open_store(incidents_);
  const BundleOutcome outcome = submit_and_wait(*store, sample_about(), parts);
  EXPECT_TRUE(outcome.published);
  EXPECT_EQ(outcome.reason,
            "3 tensors of 24 bytes left out: its bytes are not as many as its dtype and shape say");
  const auto bundle = open_bundle(bundle_path());
  ASSERT_NE(bundle, nullptr);
  std::map<std::string, std::string> omitted;
  for (const Omitted& one : bundle->manifest().parts(0).omitted()) omitted[one.what()] = one.why();
  EXPECT_EQ(omitted, (std::map<std::string, std::string>{
                         {"odd", "its dtype is none of safetensors"},
                         {"short", "its bytes are not as many as its dtype and shape say"},
                         {"huge", "its size overflows"}}));
}

TEST_F(EvidenceStoreTest, TheJsonIsStrictAndKeepsTheThreeClassesApart) {
  BundleManifest about = sample_about();
  about.set_loss(std::numeric_limits<double>::quiet_NaN());
  about.set_loss_scale(std::numeric_limits<double>::infinity());
  std::vector<EvidencePart> parts = {sample_part(7)};
  parts[0].mutable_stages(0)->set_abs_max(-std::numeric_limits<double>::infinity());
  parts[0].set_first_dirty("fc\xff\x1b[2J");
  auto store = open_store(incidents_);
  const BundleOutcome outcome = submit_and_wait(*store, about, parts);
  ASSERT_TRUE(outcome.published) << outcome.reason;
  const std::string text = read_file(bundle_path() + "/manifest.json");
  const Json json = Json::parse(text);
  EXPECT_EQ(json["content_id"], outcome.content_id);
  EXPECT_EQ(json["loss"], "nan");
  EXPECT_EQ(json["loss_scale"], "inf");
  EXPECT_EQ(json["parts"][0]["stages"][0]["abs_max"], "-inf");
  EXPECT_EQ(json["stage"], "forward");
  EXPECT_EQ(json["parts"][0]["first_dirty"], "fc\xef\xbf\xbd\x1b[2J");
  EXPECT_EQ(json["parts"][0]["tensors"][0]["role"], "BATCH");
  EXPECT_EQ(json["parts"][0]["tensors"][0]["digest_high"].get<std::string>().size(), 16u);
  EXPECT_EQ(text.find('\x1b'), std::string::npos);
}

TEST_F(EvidenceStoreTest, BeyondABundlesQuotaStateGoesFirstThenWhatWasSeenAndTheBatchLast) {
  struct Step {
    std::uint64_t quota;
    std::vector<std::string> kept;
  };
  const std::vector<Step> steps = {
      {3 + 16 + 32 + 8, {"BATCH/input", "BATCH/targets", "SEEN/fc", "STATE/fc.weight"}},
      {3 + 16 + 32 + 8 - 1, {"BATCH/input", "BATCH/targets", "SEEN/fc"}},
      {3 + 16 + 8 - 1, {"BATCH/input", "BATCH/targets"}},
      {3 + 16 - 1, {"BATCH/targets"}},
      {3 - 1, {}},
  };
  for (const Step& step : steps) {
    SCOPED_TRACE(step.quota);
    TempDir temp;
    options_.bundle_quota_bytes = step.quota;
    auto store = open_store(temp / "incidents", options_);
    const BundleOutcome outcome = submit_and_wait(*store, sample_about(), {sample_part(7)});
    ASSERT_TRUE(outcome.published) << outcome.reason;
    EXPECT_EQ(outcome.compact, step.kept.empty());
    const auto bundle = open_bundle(temp / "incidents/" + kName);
    ASSERT_NE(bundle, nullptr);
    EXPECT_EQ(bundle->verify(), std::vector<std::string>());
    std::vector<std::string> kept;
    for (const auto& [name, bytes] : tensors_of(*bundle)) kept.push_back(name);
    EXPECT_EQ(kept, step.kept);
    EXPECT_EQ(static_cast<std::size_t>(bundle->manifest().parts(0).omitted_size()), 4 - step.kept.size());
    for (const Omitted& omitted : bundle->manifest().parts(0).omitted()) {
      EXPECT_EQ(omitted.why(), "the quota of a bundle");
    }
  }
}

TEST_F(EvidenceStoreTest, OfOneRoleTheLargestGoesFirst) {
  EvidencePart part;
  part.set_rank(0);
  for (const std::uint64_t size : {2, 9, 4, 7}) {
    *part.add_tensors() =
        sample_tensor(EvidenceTensor::SEEN, std::to_string(size), "U8", {size}, std::string(size, 's'));
  }
  options_.bundle_quota_bytes = 10;
  auto store = open_store(incidents_, options_);
  ASSERT_TRUE(submit_and_wait(*store, sample_about(), {part}).published);
  const auto bundle = open_bundle(bundle_path());
  ASSERT_NE(bundle, nullptr);
  EXPECT_EQ(tensors_of(*bundle, 0),
            (std::map<std::string, std::string>{{"SEEN/2", "ss"}, {"SEEN/4", "ssss"}}));
}

TEST_F(EvidenceStoreTest, AfterTheFirstIncidentsBundlesAreCompactAndHoldEverythingElse) {
  options_.full_incidents = 2;
  auto store = open_store(incidents_, options_);
  EXPECT_FALSE(write(*store, 1).compact);
  EXPECT_GT(store->next().bytes, 0u);
  EXPECT_FALSE(write(*store, 2).compact);
  EXPECT_EQ(store->next().bytes, 0u);
  const BundleOutcome third = write(*store, 3);
  EXPECT_TRUE(third.published);
  EXPECT_TRUE(third.compact);
  EXPECT_EQ(third.reason, "8 tensors of 118 bytes left out: the first 2 incidents are kept in full");
  const std::string path = bundle_path("e0001-a0000000003");
  EXPECT_EQ(names_in(path),
            (std::vector<std::string>{"manifest.json", "manifest.pb", "report.json", "report.md"}));
  const auto bundle = open_bundle(path);
  ASSERT_NE(bundle, nullptr);
  EXPECT_EQ(bundle->verify(), std::vector<std::string>());
  EXPECT_TRUE(bundle->manifest().compact());
  EXPECT_EQ(bundle->manifest().parts(1).facts(0).value(), "rank 7");
  EXPECT_EQ(bundle->manifest().parts(1).stages(0).elements(), 4u);
}

TEST_F(EvidenceStoreTest, OneThatHasNoTensorsDoesNotCountAsFull) {
  options_.full_incidents = 1;
  auto store = open_store(incidents_, options_);
  EXPECT_TRUE(submit_and_wait(*store, sample_about(1), {}).compact);
  EXPECT_GT(store->next().bytes, 0u);
  BundleManifest asked = sample_about(2);
  asked.set_compact(true);
  EXPECT_TRUE(submit_and_wait(*store, asked, sample_parts()).compact);
  EXPECT_GT(store->next().bytes, 0u);
  EXPECT_FALSE(write(*store, 3).compact);
  EXPECT_EQ(store->next().bytes, 0u);
}

TEST_F(EvidenceStoreTest, ALaterStoreGoesOnWhereTheEarlierOneWas) {
  options_.full_incidents = 2;
  options_.most_bundles = 3;
  std::uint64_t used = 0;
  {
    auto store = open_store(incidents_, options_);
    used = write(*store, 1).bytes;
    used += write(*store, 2).bytes;
  }
  std::filesystem::create_directory(incidents_ + "/.e0001-a0000000003.partial");
  write_file(incidents_ + "/.e0001-a0000000003.partial/manifest.pb", "half");
  options_.run_quota_bytes = used + 10;
  auto store = open_store(incidents_, options_);
  EXPECT_EQ(store->next().bytes, 0u);
  EXPECT_EQ(names_in(incidents_), (std::vector<std::string>{"e0001-a0000000001", "e0001-a0000000002"}));
  options_.full_incidents = 3;
  store = open_store(incidents_, options_);
  EXPECT_EQ(store->next().bytes, 10u);
  EXPECT_TRUE(write(*store, 4).published);
  const BundleOutcome refused = write(*store, 5);
  EXPECT_FALSE(refused.published);
  EXPECT_EQ(refused.bytes, 0u);
  EXPECT_EQ(refused.reason,
            "e0001-a0000000005 refused: there are 3 bundles already, the most that are kept of a run");
  EXPECT_EQ(names_in(incidents_).size(), 3u);
}

TEST_F(EvidenceStoreTest, WhenTheRunsQuotaIsUsedUpBundlesAreCompact) {
  options_.run_quota_bytes = 100;
  auto store = open_store(incidents_, options_);
  EXPECT_EQ(store->next().bytes, 100u);
  const BundleOutcome first = submit_and_wait(*store, sample_about(1), sample_parts());
  EXPECT_FALSE(first.compact);
  EXPECT_EQ(first.reason, "1 tensors of 32 bytes left out: the quota of the run");
  EXPECT_EQ(store->next().bytes, 0u);
  const BundleOutcome second = write(*store, 2);
  EXPECT_TRUE(second.published);
  EXPECT_TRUE(second.compact);
  EXPECT_EQ(second.reason, "8 tensors of 118 bytes left out: the run's quota is used up");
}

TEST_F(EvidenceStoreTest, TheSameIncidentTwiceIsRefusedAndTheFirstStays) {
  auto store = open_store(incidents_);
  const BundleOutcome first = write(*store);
  const BundleOutcome second = write(*store);
  EXPECT_FALSE(second.published);
  EXPECT_EQ(second.reason, kName + " refused: it is there already");
  EXPECT_EQ(open_bundle(bundle_path())->content_id(), first.content_id);
  EXPECT_EQ(names_in(incidents_), std::vector<std::string>{kName});
}

TEST_F(EvidenceStoreTest, WhatCouldNotBeReadBackIsNotPublished) {
  auto store = open_store(incidents_);
  for (const int rank : {-1, 8}) {
    const BundleOutcome outcome = submit_and_wait(*store, sample_about(), {sample_part(rank)});
    EXPECT_FALSE(outcome.published);
    EXPECT_EQ(outcome.reason,
              kName + ": the manifest is damaged: it has a part of a rank that the run did not have");
  }
  const BundleOutcome twice = submit_and_wait(*store, sample_about(), {sample_part(7), sample_part(7)});
  EXPECT_FALSE(twice.published);
  EXPECT_EQ(names_in(incidents_), std::vector<std::string>{});
  EXPECT_TRUE(write(*store).published);
}

TEST_F(EvidenceStoreTest, TimeIsUnderTheContentIdAndThePlaceIsNot) {
  auto store = open_store(incidents_);
  const BundleOutcome here = write(*store);
  auto other = open_store(temp_ / "elsewhere");
  EXPECT_EQ(write(*other).content_id, here.content_id);
  auto later = open_store(temp_ / "later");
  BundleManifest about = sample_about();
  about.set_time("2026-11-29T16:23:27.623Z");
  EXPECT_NE(submit_and_wait(*later, about, sample_parts()).content_id, here.content_id);
}

TEST_F(EvidenceStoreTest, HostileNamesReachNoPathAndNoTerminal) {
  const std::vector<std::string> hostile = {"../../x",
                                            "/etc/x",
                                            "\x1b[2J",
                                            "|`<script>alert(1)</script>",
                                            std::string("a\0b", 3),
                                            "\n# head",
                                            "__metadata__",
                                            "",
                                            "..",
                                            "\xff\xfe"};
  std::vector<EvidencePart> parts = {sample_part(7)};
  parts[0].mutable_stages(0)->set_tensors(hostile.size() + 1);
  BundleManifest about = sample_about();
  for (const std::string& name : hostile) {
    for (const auto role : {EvidenceTensor::BATCH, EvidenceTensor::STATE, EvidenceTensor::SEEN}) {
      *parts[0].add_tensors() = sample_tensor(role, name, "U8", {1}, "x");
    }
    parts[0].mutable_stages(0)->add_names(name);
    Named* fact = parts[0].add_facts();
    fact->set_name(name);
    fact->set_value(name);
    about.mutable_origins(0)->set_tensor(name);
    about.set_run(name);
    about.set_owner(name);
    about.set_reason(name);
    parts[0].set_host(name);
  }
  auto store = open_store(incidents_);
  const BundleOutcome outcome = submit_and_wait(*store, about, parts);
  ASSERT_TRUE(outcome.published) << outcome.reason;
  EXPECT_EQ(outcome.reason, "");
  EXPECT_EQ(fault_of_bundle(bundle_path()), "");
  EXPECT_EQ(names_in(temp_.path()), std::vector<std::string>{"incidents"});
  EXPECT_EQ(names_in(incidents_), std::vector<std::string>{kName});
  EXPECT_EQ(names_in(bundle_path()),
            (std::vector<std::string>{"manifest.json", "manifest.pb", "rank-00007.safetensors", "report.json",
                                      "report.md"}));
  for (const char* name : {"manifest.json", "report.json", "report.md"}) {
    const std::string text = read_file(bundle_path() + "/" + name);
    EXPECT_EQ(text.find('\x1b'), std::string::npos) << name;
    EXPECT_EQ(text.find('\0'), std::string::npos) << name;
  }
  EXPECT_EQ(read_file(bundle_path() + "/report.md").find("<script>"), std::string::npos);
}

TEST_F(EvidenceStoreTest, AnIncidentOutsideOfTheContractHasNoReportJson) {
  BundleManifest about = sample_about();
  about.set_kind("ERROR");
  about.clear_stage();
  about.clear_origins();
  about.clear_nan();
  about.clear_pos_inf();
  about.set_error("std::runtime_error: no such shard");
  auto store = open_store(incidents_);
  const BundleOutcome outcome = submit_and_wait(*store, about, {});
  ASSERT_TRUE(outcome.published);
  EXPECT_EQ(names_in(bundle_path()), (std::vector<std::string>{"manifest.json", "manifest.pb", "report.md"}));
  EXPECT_EQ(outcome.reason,
            "no incident report: ERROR without a non-finite value is outside of training-incident-v1");
  EXPECT_EQ(fault_of_bundle(bundle_path()), "");
}

TEST_F(EvidenceStoreTest, AFolderThatCannotBeMadeIsSaid) {
  write_file(incidents_, "in the way");
  std::unique_ptr<EvidenceStore> store;
  const Status status = EvidenceStore::create(real_file_system(), incidents_, options_, &store);
  EXPECT_EQ(status.code(), StatusCode::kInternal);
  EXPECT_NE(status.message().find(incidents_), std::string::npos);
  EXPECT_EQ(store, nullptr);
}

}  // namespace
}  // namespace holdfast
