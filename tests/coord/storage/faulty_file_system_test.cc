// That the tests' own disk does what it says.
#include "coord/storage/faulty_file_system.h"

#include <gtest/gtest.h>

#include "coord/temp_dir.h"
#include "holdfast/coord/storage/publication.h"

namespace holdfast {
namespace {

class FaultyFileSystemTest : public testing::Test {
 protected:
  std::unique_ptr<WritableFile> created(const std::string& name) {
    std::unique_ptr<WritableFile> file;
    EXPECT_TRUE(faulty.create_file(dir / name, &file).ok());
    return file;
  }
  std::vector<std::string> names() {
    std::vector<std::string> all;
    EXPECT_TRUE(real_file_system().list(dir.path(), &all).ok());
    return all;
  }
  using Names = std::vector<std::string>;

  TempDir dir;
  FaultyFileSystem faulty;
};

TEST_F(FaultyFileSystemTest, ACallFailsOnceOrForEver) {
  faulty.fail_at(1, "once");
  EXPECT_EQ(faulty.create_folder(dir / "a").message(), "cannot create_folder " + dir / "a: once");
  EXPECT_EQ(names(), Names{});
  EXPECT_TRUE(faulty.create_folder(dir / "a").ok());
  faulty.fail_from(3, "for ever");
  EXPECT_EQ(faulty.remove_folder(dir / "a").message(), "cannot remove_folder " + dir / "a: for ever");
  EXPECT_FALSE(faulty.sync_folder(dir.path()).ok());
  EXPECT_EQ(faulty.calls(), 4);
  EXPECT_FALSE(faulty.dead());
}

TEST_F(FaultyFileSystemTest, AFullDiskTakesWhatStillFitsUntilSpaceIsBack) {
  faulty.full_after(5);
  faulty.report_free(5);
  auto file = created("a");
  EXPECT_TRUE(file->append("123").ok());
  EXPECT_EQ(file->append("4567").message(), "cannot append " + dir / "a: No space left on device");
  EXPECT_FALSE(file->append("x").ok());
  EXPECT_EQ(read_file(dir / "a"), "12345");
  std::uint64_t bytes = 0;
  ASSERT_TRUE(faulty.free_bytes(dir.path(), &bytes).ok());
  EXPECT_EQ(bytes, 5u);
  faulty.space_is_back();
  EXPECT_TRUE(file->append("67").ok());
  EXPECT_EQ(read_file(dir / "a"), "1234567");
  EXPECT_EQ(faulty.appended_bytes(), 7u);
}

TEST_F(FaultyFileSystemTest, ADeathIsTheEndOfEveryCall) {
  auto file = created("a");
  faulty.die_at(2, When::kTorn);
  EXPECT_FALSE(file->append("12345678").ok());
  EXPECT_TRUE(faulty.dead());
  EXPECT_FALSE(file->append("9").ok());
  EXPECT_FALSE(faulty.remove_file(dir / "a").ok());
  EXPECT_EQ(read_file(dir / "a"), "1234");
}

TEST_F(FaultyFileSystemTest, APowerCutTakesWhatWasNotSynced) {
  auto file = created("a");
  ASSERT_TRUE(file->append("synced").ok());
  ASSERT_TRUE(file->sync().ok());
  ASSERT_TRUE(file->append(" and not").ok());
  ASSERT_TRUE(faulty.sync_folder(dir.path()).ok());
  ASSERT_TRUE(created("nameless")->sync().ok());
  ASSERT_TRUE(faulty.cut_power().ok());
  EXPECT_EQ(names(), Names{"a"});
  EXPECT_EQ(read_file(dir / "a"), "synced");
  EXPECT_TRUE(faulty.dead());
}

TEST_F(FaultyFileSystemTest, APowerCutUndoesRenamesAndRemovals) {
  write_file(dir / "old", "old");
  write_file(dir / "gone", "gone");
  ASSERT_TRUE(write_synced(faulty, dir / "new", "new").ok());
  ASSERT_TRUE(faulty.create_folder(dir / "folder").ok());
  ASSERT_TRUE(faulty.sync_folder(dir.path()).ok());
  ASSERT_TRUE(faulty.rename(dir / "new", dir / "old").ok());
  ASSERT_TRUE(faulty.remove_file(dir / "gone").ok());
  ASSERT_TRUE(faulty.rename(dir / "folder", dir / "moved").ok());
  ASSERT_TRUE(write_synced(faulty, dir / "moved/file", "x").ok());
  ASSERT_TRUE(faulty.sync_folder(dir / "moved").ok());
  EXPECT_EQ(read_file(dir / "old"), "new");
  ASSERT_TRUE(faulty.cut_power().ok());
  EXPECT_EQ(names(), (Names{"folder", "gone", "new", "old"}));
  EXPECT_EQ(read_file(dir / "old"), "old");
  EXPECT_EQ(read_file(dir / "new"), "new");
  EXPECT_EQ(read_file(dir / "gone"), "gone");
  EXPECT_EQ(read_file(dir / "folder/file"), "x");
}

TEST_F(FaultyFileSystemTest, WhatWasSyncedStaysRenamedAndRemoved) {
  ASSERT_TRUE(faulty.create_folder(dir / "folder").ok());
  ASSERT_TRUE(write_synced(faulty, dir / "folder/file", "x").ok());
  ASSERT_TRUE(faulty.create_folder(dir / "other").ok());
  ASSERT_TRUE(faulty.rename(dir / "folder/file", dir / "other/file").ok());
  ASSERT_TRUE(remove_tree(faulty, dir / "folder").ok());
  for (const std::string& path : {dir / "other", dir.path()}) ASSERT_TRUE(faulty.sync_folder(path).ok());
  const Status cut = faulty.cut_power();
  ASSERT_TRUE(cut.ok()) << cut.message();
  EXPECT_EQ(names(), Names{"other"});
  EXPECT_EQ(read_file(dir / "other/file"), "x");
}

}  // namespace
}  // namespace holdfast
