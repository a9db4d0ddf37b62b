// A disk that fails, fills up, dies or hangs while a bundle is written: there is a whole bundle or none, an
// outcome that says why, and nobody waits.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>

#include "coord/evidence/sample_bundle.h"
#include "coord/storage/faulty_file_system.h"
#include "coord/storage/small_disk.h"
#include "ranks/checkpoint/forwarding_file_system.h"

namespace holdfast {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

const std::string kName = "e0001-a0000001842";

// From create() to the end of the bundle.
int calls_of_one() {
  TempDir temp;
  FaultyFileSystem files;
  auto store = open_store(temp / "incidents", {}, files);
  EXPECT_TRUE(submit_and_wait(*store, sample_about(), sample_parts()).published);
  return files.calls();
}

int calls_of_create() {
  TempDir temp;
  FaultyFileSystem files;
  open_store(temp / "incidents", {}, files);
  return files.calls();
}

// What another run then finds, and that it can go on.
bool whole_bundle_left(const std::string& incidents) {
  const bool there = real_file_system().exists(incidents + "/" + kName);
  EXPECT_EQ(there ? fault_of_bundle(incidents + "/" + kName) : "", "");
  auto store = open_store(incidents);
  std::vector<std::string> names;
  EXPECT_TRUE(real_file_system().list(incidents, &names).ok());
  EXPECT_EQ(names, there ? std::vector<std::string>{kName} : std::vector<std::string>{});
  EXPECT_EQ(submit_and_wait(*store, sample_about(), sample_parts()).published, !there);
  EXPECT_EQ(fault_of_bundle(incidents + "/" + kName), "");
  return there;
}

TEST(EvidenceFaultsTest, AFailureOfAnyCallLeavesAWholeBundleOrNoneAndAReason) {
  const int first = calls_of_create() + 1;
  const int last = calls_of_one();
  ASSERT_GT(last - first, 20);
  for (int n = first; n <= last; ++n) {
    SCOPED_TRACE(n);
    TempDir temp;
    FaultyFileSystem files;
    auto store = open_store(temp / "incidents", {}, files);
    ASSERT_NE(store, nullptr);
    files.fail_at(n, "Stale file handle");
    const BundleOutcome outcome = submit_and_wait(*store, sample_about(), sample_parts());
    EXPECT_FALSE(outcome.published);
    EXPECT_EQ(outcome.content_id, "");
    EXPECT_TRUE(outcome.reason.starts_with(kName + ": ")) << outcome.reason;
    EXPECT_TRUE(outcome.reason.ends_with(": Stale file handle")) << outcome.reason;
    EXPECT_EQ(outcome.bytes > 0, n == last);
    store.reset();
    EXPECT_EQ(whole_bundle_left(temp / "incidents"), n == last);
  }
}

TEST(EvidenceFaultsTest, ADeathAtAnyCallLeavesAWholeBundleOrNone) {
  const int last = calls_of_one();
  for (const When when : {When::kBefore, When::kTorn, When::kAfter}) {
    for (int n = 1; n <= last; ++n) {
      SCOPED_TRACE(testing::Message() << n << " when " << static_cast<int>(when));
      TempDir temp;
      const std::string incidents = temp / "incidents";
      const pid_t child = fork();
      ASSERT_GE(child, 0);
      if (child == 0) {
        FaultyFileSystem files;
        files.exit_at(n, when);
        std::unique_ptr<EvidenceStore> store;
        if (!EvidenceStore::create(files, incidents, {}, &store).ok()) _exit(1);
        _exit(submit_and_wait(*store, sample_about(), sample_parts()).published ? 0 : 2);
      }
      int how = 0;
      ASSERT_EQ(waitpid(child, &how, 0), child);
      EXPECT_TRUE(WIFEXITED(how) && WEXITSTATUS(how) == 137) << how;
      const bool renamed = n == last || (n == last - 1 && when == When::kAfter);
      EXPECT_EQ(whole_bundle_left(incidents), renamed);
    }
  }
}

TEST(EvidenceFaultsTest, APowerCutAtAnyCallLeavesAWholeBundleOrNone) {
  const int last = calls_of_one();
  for (const When when : {When::kBefore, When::kTorn, When::kAfter}) {
    for (int n = calls_of_create() + 1; n <= last; ++n) {
      SCOPED_TRACE(testing::Message() << n << " when " << static_cast<int>(when));
      TempDir temp;
      FaultyFileSystem files;
      auto store = open_store(temp / "incidents", {}, files);
      files.die_at(n, when);
      EXPECT_FALSE(submit_and_wait(*store, sample_about(), sample_parts()).published);
      store.reset();
      ASSERT_TRUE(files.cut_power().ok());
      (void)whole_bundle_left(temp / "incidents");
    }
  }
}

TEST(EvidenceFaultsTest, ADiskThatFillsUpOnTheWayLeavesNoneAndTheNextIsWrittenWhenThereIsRoom) {
  TempDir temp;
  FaultyFileSystem files;
  auto store = open_store(temp / "incidents", {}, files);
  for (const std::uint64_t fits : {0, 1, 500, 1000, 3000}) {
    SCOPED_TRACE(fits);
    files.full_after(fits);
    const BundleOutcome outcome = submit_and_wait(*store, sample_about(), sample_parts());
    EXPECT_FALSE(outcome.published);
    EXPECT_NE(outcome.reason.find("No space left on device"), std::string::npos) << outcome.reason;
    std::vector<std::string> names;
    ASSERT_TRUE(real_file_system().list(temp / "incidents", &names).ok());
    EXPECT_EQ(names, std::vector<std::string>{});
  }
  files.space_is_back();
  EXPECT_GT(store->next().bytes, 0u);
  EXPECT_TRUE(submit_and_wait(*store, sample_about(), sample_parts()).published);
}

TEST(EvidenceFaultsTest, ADiskWithLittleRoomGetsWhatFitsAndOneWithNoneIsNotFilled) {
  TempDir temp;
  FaultyFileSystem files;
  auto store = open_store(temp / "incidents", {}, files);
  files.report_free(1000);
  const BundleOutcome refused = submit_and_wait(*store, sample_about(), sample_parts());
  EXPECT_FALSE(refused.published);
  EXPECT_NE(refused.reason.find("no space in " + (temp / "incidents")), std::string::npos) << refused.reason;
  EXPECT_EQ(files.appended_bytes(), 0u);

  std::vector<EvidencePart> parts = {sample_part(7)};
  *parts[0].add_tensors() =
      sample_tensor(EvidenceTensor::STATE, "large", "U8", {1 << 20}, std::string(1 << 20, 'l'));
  files.report_free(1 << 20);
  const BundleOutcome outcome = submit_and_wait(*store, sample_about(), parts);
  EXPECT_TRUE(outcome.published);
  EXPECT_FALSE(outcome.compact);
  EXPECT_EQ(outcome.reason, "1 tensors of 1048576 bytes left out: the disk has no room for it");
}

TEST(EvidenceFaultsTest, ARealDiskOfOneMebibyteFillsUpAndWhatIsThereStaysWhole) {
  SmallDisk disk("1M");
  if (!disk.mounted()) GTEST_SKIP() << disk.why_not();
  auto store = open_store(disk / "incidents");
  ASSERT_NE(store, nullptr);
  std::vector<EvidencePart> parts = {sample_part(7)};
  *parts[0].add_tensors() =
      sample_tensor(EvidenceTensor::SEEN, "large", "U8", {300 << 10}, std::string(300 << 10, 'l'));
  int published = 0;
  std::string last;
  for (std::uint64_t attempt = 0; attempt < 40; ++attempt) {
    const BundleOutcome outcome = submit_and_wait(*store, sample_about(attempt), parts);
    published += outcome.published ? 1 : 0;
    last = outcome.reason;
  }
  EXPECT_GE(published, 3);
  EXPECT_LT(published, 40);
  EXPECT_NE(last.find("pace"), std::string::npos) << last;
  std::vector<std::string> names;
  ASSERT_TRUE(real_file_system().list(disk / "incidents", &names).ok());
  EXPECT_EQ(names.size(), static_cast<std::size_t>(published));
  for (const std::string& name : names) EXPECT_EQ(fault_of_bundle(disk / "incidents/" + name), "");
}

// Root may write into any folder, but not onto a disk that is mounted for reading.
TEST(EvidenceFaultsTest, AFolderThatMayOnlyBeReadIsAnOutcome) {
  SmallDisk disk("1M");
  if (!disk.mounted()) GTEST_SKIP() << disk.why_not();
  auto store = open_store(disk / "incidents");
  ASSERT_NE(store, nullptr);
  ASSERT_EQ(mount("tmpfs", disk.path().c_str(), "tmpfs", MS_REMOUNT | MS_RDONLY, ""), 0);
  const BundleOutcome outcome = submit_and_wait(*store, sample_about(), sample_parts());
  EXPECT_FALSE(outcome.published);
  EXPECT_NE(outcome.reason.find("Read-only file system"), std::string::npos) << outcome.reason;
  std::unique_ptr<EvidenceStore> none;
  EXPECT_FALSE(EvidenceStore::create(real_file_system(), disk / "other", {}, &none).ok());
}

TEST(EvidenceFaultsTest, OnADiskThatHangsNobodyWaitsAndTheThirdIsRefused) {
  TempDir temp;
  GatedFileSystem files;
  auto store = open_store(temp / "incidents", {}, files);
  files.close();
  const auto begun = Clock::now();
  store->submit(sample_about(1), sample_parts());
  files.wait_for_a_writer();
  store->submit(sample_about(2), sample_parts());
  EXPECT_EQ(store->next().bytes, 0u);
  for (std::uint64_t attempt = 3; attempt < 10; ++attempt)
    store->submit(sample_about(attempt), sample_parts());
  EXPECT_FALSE(store->wait_for(milliseconds(20)));
  EXPECT_LT(Clock::now() - begun, std::chrono::seconds(5));
  std::vector<BundleOutcome> outcomes = store->take_outcomes();
  ASSERT_EQ(outcomes.size(), 7u);
  for (const BundleOutcome& outcome : outcomes) {
    EXPECT_FALSE(outcome.published);
    EXPECT_EQ(
        outcome.reason,
        outcome.id.name() + " refused: one bundle with tensors is still being written and another waits");
  }
  files.open();
  EXPECT_TRUE(store->wait_for(kLongEnough));
  outcomes = store->take_outcomes();
  ASSERT_EQ(outcomes.size(), 2u);
  EXPECT_TRUE(outcomes[0].published && outcomes[1].published);
  EXPECT_GE(outcomes[0].seconds, 0.02);
  EXPECT_GT(store->next().bytes, 0u);
}

// What has no tensors in memory waits for the disk.
TEST(EvidenceFaultsTest, OnADiskThatHangsBundlesWithoutTensorsWaitUpToACap) {
  TempDir temp;
  GatedFileSystem files;
  auto store = open_store(temp / "incidents", {}, files);
  files.close();
  std::vector<EvidencePart> bare = sample_parts();
  for (EvidencePart& part : bare) {
    for (EvidenceTensor& tensor : *part.mutable_tensors()) {
      tensor.clear_shape();
      tensor.add_shape(0);  // a batch without a single sample
      tensor.clear_data();
    }
  }
  store->submit(sample_about(1), sample_parts());
  files.wait_for_a_writer();
  store->submit(sample_about(2), sample_parts());
  EXPECT_EQ(store->next().why, "one bundle with tensors is still being written and another waits");
  for (std::uint64_t attempt = 3; attempt <= 17; ++attempt) {
    BundleManifest about = sample_about(attempt);
    about.set_compact(true);
    store->submit(about, bare);
  }
  EXPECT_EQ(store->next().why, "one bundle with tensors is still being written and another waits");
  std::vector<BundleOutcome> outcomes = store->take_outcomes();
  ASSERT_EQ(outcomes.size(), 1u);
  EXPECT_EQ(outcomes[0].reason, "e0001-a0000000017 refused: 16 bundles wait to be written");
  files.open();
  ASSERT_TRUE(store->wait_for(kLongEnough));
  outcomes = store->take_outcomes();
  ASSERT_EQ(outcomes.size(), 16u);
  for (std::size_t i = 0; i < outcomes.size(); ++i) {
    EXPECT_TRUE(outcomes[i].published) << outcomes[i].reason;
    EXPECT_EQ(outcomes[i].id.attempt, i + 1);
    EXPECT_EQ(outcomes[i].compact, i >= 2);
  }
  EXPECT_GT(store->next().bytes, 0u);
}

// While two wait, what each may hold is not promised to the other.
TEST(EvidenceFaultsTest, QuotasHoldOverBundlesThatAreNotYetWritten) {
  TempDir temp;
  GatedFileSystem files;
  EvidenceOptions options;
  options.full_incidents = 1;
  options.bundle_quota_bytes = 1000;
  auto store = open_store(temp / "incidents", options, files);
  files.close();
  store->submit(sample_about(1), sample_parts());
  EXPECT_EQ(store->next().bytes, 0u);
  store->submit(sample_about(2), sample_parts());
  files.open();
  ASSERT_TRUE(store->wait_for(kLongEnough));
  const std::vector<BundleOutcome> outcomes = store->take_outcomes();
  ASSERT_EQ(outcomes.size(), 2u);
  EXPECT_FALSE(outcomes[0].compact);
  EXPECT_TRUE(outcomes[1].compact);
}

// What a file system may throw, such as for want of memory.
class ThrowingFileSystem final : public ForwardingFileSystem {
 public:
  Status create_file(const std::string& path, std::unique_ptr<WritableFile>* out) override {
    if (path.find("report.md") != std::string::npos && !std::exchange(thrown_, true)) throw std::bad_alloc();
    return ForwardingFileSystem::create_file(path, out);
  }

 private:
  bool thrown_ = false;
};

TEST(EvidenceFaultsTest, WantOfMemoryIsAnOutcomeAndLeavesNothing) {
  TempDir temp;
  ThrowingFileSystem files;
  auto store = open_store(temp / "incidents", {}, files);
  const BundleOutcome outcome = submit_and_wait(*store, sample_about(), sample_parts());
  EXPECT_FALSE(outcome.published);
  EXPECT_EQ(outcome.reason, "out of memory");
  EXPECT_EQ(outcome.id.name(), kName);
  EXPECT_FALSE(whole_bundle_left(temp / "incidents"));
}

}  // namespace
}  // namespace holdfast
