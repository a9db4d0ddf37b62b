#include "holdfast/coord/storage/file_system.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <limits>

#include "coord/file_size_limit.h"
#include "coord/storage/small_disk.h"
#include "coord/temp_dir.h"

namespace holdfast {
namespace {

namespace fs = std::filesystem;

class Umask {
 public:
  explicit Umask(mode_t mask) : before_(umask(mask)) {}
  ~Umask() { umask(before_); }
  Umask(const Umask&) = delete;
  Umask& operator=(const Umask&) = delete;

 private:
  const mode_t before_;
};

mode_t mode_of(const std::string& path) {
  struct stat info = {};
  return lstat(path.c_str(), &info) == 0 ? info.st_mode & 07777 : 0;
}

bool has(const Status& status, const std::string& text) {
  return status.code() == StatusCode::kInternal && status.message().find(text) != std::string::npos;
}

std::string text_of(const std::vector<std::byte>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

class RealFileSystemTest : public testing::Test {
 protected:
  std::unique_ptr<WritableFile> created(const std::string& path) {
    std::unique_ptr<WritableFile> file;
    EXPECT_TRUE(files.create_file(path, &file).ok());
    return file;
  }
  Status open(const std::string& path) {
    std::unique_ptr<ReadableFile> file;
    Status status = files.open_file(path, &file);
    EXPECT_EQ(file != nullptr, status.ok());
    return status;
  }

  TempDir dir;
  FileSystem& files = real_file_system();
};

TEST_F(RealFileSystemTest, WhatIsAppendedIsReadInItsOrder) {
  auto out = created(dir / "a");
  ASSERT_TRUE(out->append("one ").ok());
  ASSERT_TRUE(out->append("").ok());
  ASSERT_TRUE(out->append("two").ok());
  ASSERT_TRUE(out->sync().ok());
  ASSERT_TRUE(out->close().ok());
  std::string bytes = "before";
  ASSERT_TRUE(read_file(files, dir / "a", 7, &bytes).ok());
  EXPECT_EQ(bytes, "one two");
}

TEST_F(RealFileSystemTest, ModesAreTheSameWhateverTheUmask) {
  int i = 0;
  for (const mode_t mask : {mode_t{0}, mode_t{022}, mode_t{077}, mode_t{0277}, mode_t{0777}}) {
    const Umask umask(mask);
    const std::string folder = dir / ("folder" + std::to_string(i)),
                      file = dir / ("file" + std::to_string(i));
    ++i;
    ASSERT_TRUE(files.create_folder(folder).ok());
    created(file);
    EXPECT_EQ(mode_of(folder), mode_t{0700}) << std::oct << mask;
    EXPECT_EQ(mode_of(file), mode_t{0600}) << std::oct << mask;
  }
}

TEST_F(RealFileSystemTest, AFolderThatIsThereIsFineAndLeftAsItIs) {
  ASSERT_TRUE(files.create_folder(dir / "a").ok());
  write_file(dir / "a/file", "kept");
  ASSERT_EQ(chmod((dir / "a").c_str(), 0750), 0);
  EXPECT_TRUE(files.create_folder(dir / "a").ok());
  EXPECT_EQ(mode_of(dir / "a"), mode_t{0750});
  EXPECT_EQ(read_file(dir / "a/file"), "kept");
}

TEST_F(RealFileSystemTest, AFolderIsNotMadeOverAnythingElse) {
  ASSERT_TRUE(files.create_folder(dir / "real").ok());
  fs::create_symlink(dir / "real", dir / "link");
  fs::create_symlink(dir / "nowhere", dir / "dangling");
  write_file(dir / "file", "kept");
  for (const char* name : {"link", "dangling", "file"}) {
    const Status status = files.create_folder(dir / name);
    EXPECT_EQ(status.message(), "cannot make the folder " + dir / name + ": that name is taken");
    EXPECT_EQ(status.code(), StatusCode::kInternal);
  }
  EXPECT_FALSE(fs::exists(dir / "nowhere"));
  EXPECT_EQ(read_file(dir / "file"), "kept");
  EXPECT_EQ(files.create_folder(dir / "none/a").message(),
            "cannot make the folder " + dir / "none/a: No such file or directory");
}

TEST_F(RealFileSystemTest, AFileIsNeverMadeOverAnything) {
  write_file(dir / "file", "kept");
  ASSERT_TRUE(files.create_folder(dir / "folder").ok());
  fs::create_symlink(dir / "nowhere", dir / "dangling");
  fs::create_symlink(dir / "file", dir / "link");
  for (const char* name : {"file", "folder", "dangling", "link"}) {
    std::unique_ptr<WritableFile> out;
    EXPECT_EQ(files.create_file(dir / name, &out).message(), "cannot create " + dir / name + ": File exists");
    EXPECT_EQ(out, nullptr);
  }
  EXPECT_FALSE(fs::exists(dir / "nowhere"));
  EXPECT_EQ(read_file(dir / "file"), "kept");
}

TEST_F(RealFileSystemTest, OnlyRegularFilesAreOpened) {
  write_file(dir / "file", "x");
  fs::create_symlink(dir / "file", dir / "link");
  ASSERT_TRUE(files.create_folder(dir / "folder").ok());
  ASSERT_EQ(mkfifo((dir / "pipe").c_str(), 0600), 0);
  EXPECT_TRUE(open(dir / "file").ok());
  EXPECT_EQ(open(dir / "link").message(), "cannot open " + dir / "link: it is a symbolic link");
  EXPECT_EQ(open(dir / "folder").message(), "cannot open " + dir / "folder: it is no regular file");
  EXPECT_EQ(open(dir / "pipe").message(),
            "cannot open " + dir / "pipe: it is no regular file");  // and no hang
  EXPECT_EQ(open("/dev/null").message(), "cannot open /dev/null: it is no regular file");
  EXPECT_EQ(open(dir / "none").message(), "cannot open " + dir / "none: No such file or directory");
}

TEST_F(RealFileSystemTest, ReadsExactlyWhatIsAskedForOrFails) {
  write_file(dir / "a", "0123456789");
  std::unique_ptr<ReadableFile> file;
  ASSERT_TRUE(files.open_file(dir / "a", &file).ok());
  EXPECT_EQ(file->size(), 10u);
  std::vector<std::byte> four(4), none;
  ASSERT_TRUE(file->read(6, four).ok());
  EXPECT_EQ(text_of(four), "6789");
  EXPECT_TRUE(file->read(10, none).ok());
  const std::string short_message = "cannot read " + dir / "a: it ends after 10 bytes";
  EXPECT_EQ(file->read(7, four).message(), short_message);
  EXPECT_EQ(file->read(11, none).message(), short_message);
  EXPECT_EQ(file->read(std::numeric_limits<std::uint64_t>::max(), four).message(), short_message);
  EXPECT_EQ(file->read(std::uint64_t{1} << 63, four).message(), short_message);
}

TEST_F(RealFileSystemTest, AFileThatIsCutWhileItIsOpenIsAFailure) {
  write_file(dir / "a", "0123456789");
  std::unique_ptr<ReadableFile> file;
  ASSERT_TRUE(files.open_file(dir / "a", &file).ok());
  fs::resize_file(dir / "a", 5);
  EXPECT_EQ(file->size(), 10u);
  std::vector<std::byte> eight(8);
  EXPECT_EQ(file->read(0, eight).message(), "cannot read " + dir / "a: it ends after 5 bytes");
}

TEST_F(RealFileSystemTest, AFileIsReadWholeUpToTheBytesThatAreAllowed) {
  write_file(dir / "a", "0123456789");
  write_file(dir / "empty", "");
  std::string bytes;
  EXPECT_TRUE(read_file(files, dir / "a", 10, &bytes).ok());
  EXPECT_EQ(bytes, "0123456789");
  EXPECT_EQ(read_file(files, dir / "a", 9, &bytes).message(),
            dir / "a is too large: 10 bytes, and at most 9 are read");
  EXPECT_EQ(bytes, "");
  EXPECT_TRUE(read_file(files, dir / "empty", 0, &bytes).ok());
  bytes = "before";
  EXPECT_FALSE(read_file(files, dir / "none", 9, &bytes).ok());
  EXPECT_EQ(bytes, "");
}

TEST_F(RealFileSystemTest, ARenameReplacesAFileAndNoFolderThatHoldsAnything) {
  write_file(dir / "new", "new");
  write_file(dir / "old", "old");
  ASSERT_TRUE(files.rename(dir / "new", dir / "old").ok());
  EXPECT_EQ(read_file(dir / "old"), "new");
  EXPECT_FALSE(files.exists(dir / "new"));
  ASSERT_TRUE(files.create_folder(dir / "full").ok());
  ASSERT_TRUE(files.create_folder(dir / "other").ok());
  write_file(dir / "full/file", "kept");
  const Status status = files.rename(dir / "other", dir / "full");
  EXPECT_EQ(status.message(),
            "cannot rename " + dir / "other" + " to " + dir / "full" + ": Directory not empty");
  EXPECT_EQ(read_file(dir / "full/file"), "kept");
  EXPECT_TRUE(has(files.rename(dir / "none", dir / "a"), "No such file or directory"));
}

TEST_F(RealFileSystemTest, NamesAreListedInOrderAndNoLinkIsFollowed) {
  ASSERT_TRUE(files.create_folder(dir / "a").ok());
  for (const char* name : {"b", "a", "..c", ".hidden", "B"}) write_file(dir / ("a/" + std::string(name)), "");
  ASSERT_TRUE(files.create_folder(dir / "a/folder").ok());
  fs::create_symlink(dir / "a", dir / "link");
  std::vector<std::string> names = {"before"};
  ASSERT_TRUE(files.list(dir / "a", &names).ok());
  EXPECT_EQ(names, (std::vector<std::string>{"..c", ".hidden", "B", "a", "b", "folder"}));
  EXPECT_EQ(files.list(dir / "link", &names).message(), "cannot list " + dir / "link: Not a directory");
  EXPECT_TRUE(names.empty());
  EXPECT_TRUE(has(files.list(dir / "none", &names), dir / "none: No such file or directory"));
}

TEST_F(RealFileSystemTest, AKindIsThatOfTheNameItself) {
  write_file(dir / "file", "x");
  ASSERT_TRUE(files.create_folder(dir / "folder").ok());
  fs::create_symlink(dir / "folder", dir / "link");
  fs::create_symlink(dir / "nowhere", dir / "dangling");
  ASSERT_EQ(mkfifo((dir / "pipe").c_str(), 0600), 0);
  EXPECT_EQ(files.kind(dir / "file"), FileKind::kFile);
  EXPECT_EQ(files.kind(dir / "folder"), FileKind::kFolder);
  for (const char* name : {"link", "dangling", "pipe"}) {
    EXPECT_EQ(files.kind(dir / name), FileKind::kOther) << name;
    EXPECT_TRUE(files.exists(dir / name)) << name;
  }
  EXPECT_FALSE(files.exists(dir / "none"));
  EXPECT_FALSE(files.exists(dir / "file/below"));
  const std::string too_long(300, 'x');
  EXPECT_EQ(files.kind(dir / too_long), FileKind::kOther) << "what cannot be looked at may be there";
}

TEST_F(RealFileSystemTest, WhatCannotBeDoneNamesThePathAndTheReason) {
  write_file(dir / "file", "x");
  ASSERT_TRUE(files.create_folder(dir / "full").ok());
  write_file(dir / "full/file", "x");
  std::uint64_t bytes = 0;
  EXPECT_EQ(files.sync_folder(dir / "file").message(),
            "cannot sync the folder " + dir / "file: Not a directory");
  EXPECT_EQ(files.remove_file(dir / "none").message(),
            "cannot remove " + dir / "none: No such file or directory");
  EXPECT_EQ(files.remove_folder(dir / "full").message(),
            "cannot remove the folder " + dir / "full: Directory not empty");
  EXPECT_TRUE(has(files.free_bytes(dir / "none", &bytes), dir / "none: No such file or directory"));
  auto file = created(dir / "closed");
  ASSERT_TRUE(file->close().ok());
  EXPECT_TRUE(has(file->append("x"), "cannot write " + dir / "closed: Bad file descriptor"));
  EXPECT_TRUE(has(file->sync(), "cannot sync " + dir / "closed: Bad file descriptor"));
  EXPECT_TRUE(has(file->close(), "cannot close " + dir / "closed: Bad file descriptor"));
}

TEST_F(RealFileSystemTest, ALinkIsRemovedAndNotWhatItPointsTo) {
  write_file(dir / "file", "kept");
  fs::create_symlink(dir / "file", dir / "link");
  ASSERT_TRUE(files.remove_file(dir / "link").ok());
  EXPECT_FALSE(files.exists(dir / "link"));
  EXPECT_EQ(read_file(dir / "file"), "kept");
}

TEST_F(RealFileSystemTest, AFileThatMayNotGrowTellsOfIt) {
  auto file = created(dir / "a");
  const FileSizeLimit limit(4);
  EXPECT_EQ(file->append("0123456789").message(), "cannot write " + dir / "a: File too large");
  EXPECT_EQ(fs::file_size(dir / "a"), 4u);
}

TEST_F(RealFileSystemTest, AFileThatIsNeverClosedIsClosedAtItsEnd) {
  const auto open_files = [] { return std::distance(fs::directory_iterator("/proc/self/fd"), {}); };
  const auto before = open_files();
  for (int i = 0; i < 3; ++i) {
    auto out = created(dir / std::to_string(i));
    std::unique_ptr<ReadableFile> in;
    ASSERT_TRUE(files.open_file(dir / std::to_string(i), &in).ok());
    ASSERT_FALSE(open(dir.path()).ok());
    std::vector<std::string> names;
    ASSERT_TRUE(files.list(dir.path(), &names).ok());
    ASSERT_TRUE(files.sync_folder(dir.path()).ok());
  }
  EXPECT_EQ(open_files(), before);
}

TEST(RealFileSystemOnASmallDisk, WhatIsFreeIsSaidAndAFullDiskIsAFailure) {
  const SmallDisk disk("1M");
  if (!disk.mounted()) GTEST_SKIP() << disk.why_not();
  FileSystem& files = real_file_system();
  std::uint64_t before = 0, after = 0;
  ASSERT_TRUE(files.free_bytes(disk.path(), &before).ok());
  EXPECT_EQ(before, 1u << 20);
  std::unique_ptr<WritableFile> file;
  ASSERT_TRUE(files.create_file(disk / "a", &file).ok());
  ASSERT_TRUE(file->append(std::string(std::size_t{1} << 19, 'x')).ok());
  ASSERT_TRUE(files.free_bytes(disk.path(), &after).ok());
  EXPECT_EQ(after, 1u << 19);
  EXPECT_EQ(file->append(std::string(std::size_t{1} << 20, 'x')).message(),
            "cannot write " + disk / "a: No space left on device");
}

}  // namespace
}  // namespace holdfast
