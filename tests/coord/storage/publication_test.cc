#include "holdfast/coord/storage/publication.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "coord/storage/small_disk.h"
#include "coord/temp_dir.h"

namespace holdfast {
namespace {

TEST(PublicationTest, AFolderAppearsWithEverythingInIt) {
  TempDir dir;
  FileSystem& files = real_file_system();
  const std::string partial = partial_path(dir.path(), "first");
  EXPECT_EQ(partial, dir / ".first.partial");
  ASSERT_TRUE(begin_publication(files, dir.path(), "first").ok());
  ASSERT_TRUE(begin_publication(files, dir.path(), "first").ok()) << "another process may have made it";
  ASSERT_TRUE(write_synced(files, partial + "/a", "bytes of a").ok());
  EXPECT_FALSE(files.exists(dir / "first"));
  ASSERT_TRUE(publish(files, dir.path(), "first").ok());
  EXPECT_EQ(read_file(dir / "first/a"), "bytes of a");
  EXPECT_FALSE(files.exists(partial));
}

TEST(PublicationTest, WhatIsThereAlreadyIsLeftAloneWhateverItIs) {
  TempDir dir;
  FileSystem& files = real_file_system();
  const auto refuses = [&] {
    EXPECT_EQ(publish(files, dir.path(), "a").message(), "cannot publish " + dir / "a: it is there already");
    EXPECT_EQ(read_file(dir / ".a.partial/file"), "new");
  };
  ASSERT_TRUE(begin_publication(files, dir.path(), "a").ok());
  ASSERT_TRUE(write_synced(files, dir / ".a.partial/file", "new").ok());
  ASSERT_TRUE(files.create_folder(dir / "a").ok());
  refuses();  // an empty one would be replaced by a rename
  write_file(dir / "a/file", "old");
  refuses();
  EXPECT_EQ(read_file(dir / "a/file"), "old");
  ASSERT_TRUE(remove_tree(files, dir / "a").ok());
  std::filesystem::create_symlink(dir / "nowhere", dir / "a");
  refuses();
  EXPECT_TRUE(std::filesystem::is_symlink(dir / "a"));
}

TEST(PublicationTest, AFileThatIsThereAlreadyIsNotWrittenOver) {
  TempDir dir;
  write_file(dir / "a", "old");
  EXPECT_EQ(write_synced(real_file_system(), dir / "a", "new").message(),
            "cannot create " + dir / "a: File exists");
  EXPECT_EQ(read_file(dir / "a"), "old");
}

TEST(PublicationTest, PartialFoldersAreRemovedAndNothingElse) {
  TempDir dir;
  FileSystem& files = real_file_system();
  ASSERT_TRUE(begin_publication(files, dir.path(), "a").ok());
  ASSERT_TRUE(write_synced(files, dir / ".a.partial/file", "x").ok());
  ASSERT_TRUE(begin_publication(files, dir.path(), "b").ok());
  write_file(dir / ".partial", "");  // the partial folder of no name
  write_file(dir / "c.partial", "");
  write_file(dir / ".d", "");
  ASSERT_TRUE(files.create_folder(dir / "e").ok());
  ASSERT_TRUE(remove_partials(files, dir.path()).ok());
  std::vector<std::string> names;
  ASSERT_TRUE(files.list(dir.path(), &names).ok());
  EXPECT_EQ(names, (std::vector<std::string>{".d", ".partial", "c.partial", "e"}));
  EXPECT_FALSE(remove_partials(files, dir / "none").ok());
}

TEST(PublicationTest, AFullDiskLeavesWhatIsPublishedAndHasRoomAgainOncePartialsAreGone) {
  const SmallDisk disk("1M");
  if (!disk.mounted()) GTEST_SKIP() << disk.why_not();
  FileSystem& files = real_file_system();
  const auto write = [&](const std::string& name, std::size_t bytes) {
    if (Status s = begin_publication(files, disk.path(), name); !s.ok()) return s;
    const std::string file = partial_path(disk.path(), name) + "/file";
    if (Status s = write_synced(files, file, std::string(bytes, name[0])); !s.ok()) return s;
    return publish(files, disk.path(), name);
  };
  ASSERT_TRUE(write("first", 300'000).ok());
  EXPECT_EQ(write("second", 900'000).message(),
            "cannot write " + disk / ".second.partial/file: No space left on device");
  EXPECT_FALSE(files.exists(disk / "second"));
  EXPECT_EQ(read_file(disk / "first/file"), std::string(300'000, 'f'));
  EXPECT_FALSE(write("third", 300'000).ok()) << "the partial folder still takes the room";
  ASSERT_TRUE(remove_partials(files, disk.path()).ok());
  EXPECT_TRUE(write("third", 300'000).ok());
  EXPECT_EQ(read_file(disk / "third/file"), std::string(300'000, 't'));
  EXPECT_EQ(read_file(disk / "first/file"), std::string(300'000, 'f'));
}

}  // namespace
}  // namespace holdfast
