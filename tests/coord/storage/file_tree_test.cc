// remove_tree and tree_bytes.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>

#include "coord/storage/faulty_file_system.h"
#include "coord/temp_dir.h"
#include "holdfast/coord/storage/file_system.h"

namespace holdfast {
namespace {

namespace fs = std::filesystem;

class FileTreeTest : public testing::Test {
 protected:
  FileTreeTest() {
    fs::create_directories(dir / "tree/sub/deeper");
    fs::create_directories(dir / "outside");
    write_file(dir / "outside/file", "0123456789");
    write_file(dir / "tree/a", "12345");
    write_file(dir / "tree/sub/b", "123");
    write_file(dir / "tree/sub/deeper/c", "1");
    fs::create_symlink(dir / "outside", dir / "tree/sub/to_folder");
    fs::create_symlink(dir / "outside/file", dir / "tree/to_file");
    fs::create_symlink(dir / "tree", dir / "tree/sub/loop");
    if (mkfifo((dir / "tree/pipe").c_str(), 0600) != 0) abort();
  }

  TempDir dir;
  FileSystem& files = real_file_system();
};

TEST_F(FileTreeTest, ATreeIsRemovedWithItsLinksAndNotWhatTheyPointTo) {
  EXPECT_TRUE(remove_tree(files, dir / "tree").ok());
  EXPECT_FALSE(files.exists(dir / "tree"));
  EXPECT_EQ(read_file(dir / "outside/file"), "0123456789");
}

TEST_F(FileTreeTest, OfALinkToATreeOnlyTheLinkIsRemoved) {
  fs::create_symlink(dir / "tree", dir / "link");
  EXPECT_TRUE(remove_tree(files, dir / "link").ok());
  EXPECT_FALSE(files.exists(dir / "link"));
  EXPECT_EQ(read_file(dir / "tree/sub/deeper/c"), "1");
}

TEST_F(FileTreeTest, WhatIsNestedTooDeeplyIsLeftAndTheRestRemoved) {
  const Status status = remove_tree(files, dir / "tree", 2);
  EXPECT_EQ(status.message(), dir / "tree/sub/deeper holds folders that are nested too deeply");
  EXPECT_EQ(read_file(dir / "tree/sub/deeper/c"), "1");
  std::vector<std::string> names;
  ASSERT_TRUE(files.list(dir / "tree", &names).ok());
  EXPECT_EQ(names, std::vector<std::string>{"sub"});
  ASSERT_TRUE(files.list(dir / "tree/sub", &names).ok());
  EXPECT_EQ(names, std::vector<std::string>{"deeper"});
  EXPECT_TRUE(remove_tree(files, dir / "tree", 3).ok());
  EXPECT_FALSE(files.exists(dir / "tree"));
}

TEST_F(FileTreeTest, RemovalGoesOnAfterAFailureAndGivesTheFirst) {
  FaultyFileSystem faulty;
  faulty.fail_at(2, "Input/output error");  // the first file's
  const Status status = remove_tree(faulty, dir / "tree");
  EXPECT_EQ(status.message(), "cannot remove_file " + dir / "tree/a: Input/output error");
  std::vector<std::string> names;
  ASSERT_TRUE(files.list(dir / "tree", &names).ok());
  EXPECT_EQ(names, std::vector<std::string>{"a"});
}

TEST_F(FileTreeTest, NothingToRemoveIsAFailure) {
  EXPECT_EQ(remove_tree(files, dir / "none").message(),
            "cannot remove " + dir / "none: No such file or directory");
}

TEST_F(FileTreeTest, BytesAreThoseOfTheRegularFilesInTheTree) {
  std::uint64_t bytes = 77;
  ASSERT_TRUE(tree_bytes(files, dir / "tree", &bytes).ok());
  EXPECT_EQ(bytes, 9u);
  ASSERT_TRUE(tree_bytes(files, dir / "tree", &bytes, 3).ok());
  EXPECT_EQ(bytes, 9u);
  EXPECT_EQ(tree_bytes(files, dir / "tree", &bytes, 2).message(),
            dir / "tree/sub/deeper holds folders that are nested too deeply");
  EXPECT_EQ(tree_bytes(files, dir / "none", &bytes).message(),
            "cannot list " + dir / "none: No such file or directory");
}

TEST_F(FileTreeTest, AFileThatCannotBeOpenedIsNotCountedAsNothing) {
  FaultyFileSystem faulty;
  faulty.fail_at(2, "Input/output error");
  std::uint64_t bytes = 0;
  EXPECT_EQ(tree_bytes(faulty, dir / "tree", &bytes).message(),
            "cannot open_file " + dir / "tree/a: Input/output error");
}

}  // namespace
}  // namespace holdfast
