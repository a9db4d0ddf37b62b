// A publication that fails, dies or loses power at any one of its calls leaves the whole folder or none.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "coord/storage/faulty_file_system.h"
#include "coord/temp_dir.h"
#include "holdfast/coord/storage/publication.h"

namespace holdfast {
namespace {

const std::string kA = "the first file's bytes";
const std::string kB(10'000, 'b');

// create_folder; create_file, append, sync, close of two files; sync_folder, rename, sync_folder.
constexpr int kCalls = 12;

Status publish_two(FileSystem& files, const std::string& parent) {
  if (Status s = begin_publication(files, parent, "name"); !s.ok()) return s;
  const std::string partial = partial_path(parent, "name");
  if (Status s = write_synced(files, partial + "/a", kA); !s.ok()) return s;
  if (Status s = write_synced(files, partial + "/b", kB); !s.ok()) return s;
  return publish(files, parent, "name");
}

enum class Left { kNone, kWhole, kPartial };

Left left_in(const std::string& parent) {
  FileSystem& files = real_file_system();
  const std::string path = parent + "/name";
  if (!files.exists(path)) return Left::kNone;
  std::vector<std::string> names;
  const bool listed = files.list(path, &names).ok();
  const bool whole = listed && names == std::vector<std::string>{"a", "b"} && read_file(path + "/a") == kA &&
                     read_file(path + "/b") == kB;
  return whole ? Left::kWhole : Left::kPartial;
}

// Whatever was left, a later start clears it away and can go on.
void expect_that_it_can_go_on(const std::string& parent, bool whole) {
  FileSystem& files = real_file_system();
  ASSERT_TRUE(remove_partials(files, parent).ok());
  std::vector<std::string> names;
  ASSERT_TRUE(files.list(parent, &names).ok());
  EXPECT_EQ(names, whole ? std::vector<std::string>{"name"} : std::vector<std::string>{});
  EXPECT_EQ(publish_two(files, parent).ok(), !whole);
  EXPECT_EQ(left_in(parent), Left::kWhole);
}

TEST(PublicationFaultsTest, ItsCallsAreThose) {
  TempDir dir;
  FaultyFileSystem files;
  ASSERT_TRUE(publish_two(files, dir.path()).ok());
  const std::string partial = dir / ".name.partial", a = partial + "/a", b = partial + "/b";
  EXPECT_EQ(files.log(), (std::vector<std::string>{
                             "create_folder " + partial, "create_file " + a, "append " + a, "sync " + a,
                             "close " + a, "create_file " + b, "append " + b, "sync " + b, "close " + b,
                             "sync_folder " + partial, "rename " + partial, "sync_folder " + dir.path()}));
  EXPECT_EQ(files.calls(), kCalls);
}

TEST(PublicationFaultsTest, AFailureOfAnyCallIsReportedAndLeavesNothingUnlessAllWasThere) {
  for (int n = 1; n <= kCalls; ++n) {
    SCOPED_TRACE(n);
    TempDir dir;
    FaultyFileSystem files;
    files.fail_at(n, "Stale file handle");
    const Status status = publish_two(files, dir.path());
    EXPECT_EQ(status.code(), StatusCode::kInternal);
    EXPECT_NE(status.message().find(": Stale file handle"), std::string::npos) << status.message();
    EXPECT_EQ(left_in(dir.path()), n == kCalls ? Left::kWhole : Left::kNone);
    expect_that_it_can_go_on(dir.path(), n == kCalls);
  }
}

TEST(PublicationFaultsTest, ADeathAtAnyCallLeavesAllOrNothing) {
  for (const When when : {When::kBefore, When::kTorn, When::kAfter}) {
    for (int n = 1; n <= kCalls; ++n) {
      SCOPED_TRACE(testing::Message() << n << " when " << static_cast<int>(when));
      TempDir dir;
      FaultyFileSystem files;
      files.die_at(n, when);
      EXPECT_FALSE(publish_two(files, dir.path()).ok());
      const bool renamed = n == kCalls || (n == kCalls - 1 && when == When::kAfter);
      EXPECT_EQ(left_in(dir.path()), renamed ? Left::kWhole : Left::kNone);
      expect_that_it_can_go_on(dir.path(), renamed);
    }
  }
}

TEST(PublicationFaultsTest, ARealDeathAtAnyCallLeavesAllOrNothing) {
  for (const When when : {When::kBefore, When::kTorn, When::kAfter}) {
    for (int n = 1; n <= kCalls; ++n) {
      SCOPED_TRACE(testing::Message() << n << " when " << static_cast<int>(when));
      TempDir dir;
      const pid_t child = fork();
      ASSERT_GE(child, 0);
      if (child == 0) {
        FaultyFileSystem files;
        files.exit_at(n, when);
        _exit(publish_two(files, dir.path()).ok() ? 0 : 1);
      }
      int how = 0;
      ASSERT_EQ(waitpid(child, &how, 0), child);
      EXPECT_TRUE(WIFEXITED(how) && WEXITSTATUS(how) == 137) << how;
      const bool renamed = n == kCalls || (n == kCalls - 1 && when == When::kAfter);
      EXPECT_EQ(left_in(dir.path()), renamed ? Left::kWhole : Left::kNone);
      expect_that_it_can_go_on(dir.path(), renamed);
    }
  }
}

TEST(PublicationFaultsTest, APowerCutAtAnyCallLeavesAllOrNothing) {
  for (const When when : {When::kBefore, When::kTorn, When::kAfter}) {
    for (int n = 1; n <= kCalls; ++n) {
      SCOPED_TRACE(testing::Message() << n << " when " << static_cast<int>(when));
      TempDir dir;
      FaultyFileSystem files;
      files.die_at(n, when);
      EXPECT_FALSE(publish_two(files, dir.path()).ok());
      const Status cut = files.cut_power();
      ASSERT_TRUE(cut.ok()) << cut.message();
      const bool synced = n == kCalls && when == When::kAfter;
      EXPECT_EQ(left_in(dir.path()), synced ? Left::kWhole : Left::kNone);
      expect_that_it_can_go_on(dir.path(), synced);
    }
  }
}

TEST(PublicationFaultsTest, WhatWasPublishedOutlivesAPowerCut) {
  TempDir dir;
  FaultyFileSystem files;
  ASSERT_TRUE(publish_two(files, dir.path()).ok());
  ASSERT_TRUE(files.cut_power().ok());
  EXPECT_EQ(left_in(dir.path()), Left::kWhole);
}

TEST(PublicationFaultsTest, ADiskThatIsFullAfterAnyNumberOfBytesLeavesNothing) {
  const std::uint64_t all = kA.size() + kB.size();
  for (std::uint64_t bytes = 0; bytes <= all; bytes += bytes < 40 ? 1 : 997) {
    SCOPED_TRACE(bytes);
    TempDir dir;
    FaultyFileSystem files;
    files.full_after(bytes);
    const Status status = publish_two(files, dir.path());
    EXPECT_NE(status.message().find("No space left on device"), std::string::npos) << status.message();
    EXPECT_EQ(left_in(dir.path()), Left::kNone);
    expect_that_it_can_go_on(dir.path(), false);
  }
  TempDir dir;
  FaultyFileSystem files;
  files.full_after(all);
  EXPECT_TRUE(publish_two(files, dir.path()).ok());
}

}  // namespace
}  // namespace holdfast
