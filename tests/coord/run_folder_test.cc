#include "holdfast/coord/run_folder.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "coord/temp_dir.h"

namespace holdfast {
namespace {

unsigned mode_of(const std::string& path) {
  struct stat info = {};
  EXPECT_EQ(stat(path.c_str(), &info), 0) << path;
  return info.st_mode & 0777;
}

bool mentions(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// Another process that holds the run folder `path` until it is destroyed.
class OtherRun {
 public:
  explicit OtherRun(const std::string& path) {
    int ready[2];
    EXPECT_EQ(pipe(ready), 0);
    EXPECT_EQ(pipe(end_), 0);
    pid_ = fork();
    if (pid_ == 0) {
      close(end_[1]);
      RunFolder folder;
      const char held = folder.create(path).ok() ? 'y' : 'n';
      char byte = 0;
      if (write(ready[1], &held, 1) == 1) static_cast<void>(!read(end_[0], &byte, 1));
      _exit(0);  // as abruptly as a killed run
    }
    char held = 'n';
    EXPECT_EQ(read(ready[0], &held, 1), 1);
    EXPECT_EQ(held, 'y');
    close(ready[0]);
    close(ready[1]);
    close(end_[0]);
  }
  ~OtherRun() {
    close(end_[1]);
    EXPECT_EQ(waitpid(pid_, nullptr, 0), pid_);
  }
  OtherRun(const OtherRun&) = delete;
  OtherRun& operator=(const OtherRun&) = delete;

  pid_t pid() const { return pid_; }

 private:
  int end_[2];
  pid_t pid_ = -1;
};

TEST(RunFolder, IsMadeWithItsParentsAndForItsOwnerOnly) {
  const TempDir temp;
  const mode_t before = umask(0);
  RunFolder folder;
  const Status status = folder.create(temp / "a/b/run");
  umask(before);
  ASSERT_TRUE(status.ok()) << status.to_string();
  EXPECT_EQ(mode_of(temp / "a/b/run"), 0700u);
  EXPECT_EQ(mode_of(temp / "a/b/run/lock") & 077, 0u);
  EXPECT_EQ(folder.path(), temp / "a/b/run");
  EXPECT_EQ(folder.events_path(), temp / "a/b/run/events.jsonl");
}

TEST(RunFolder, AnExistingFolderThatOthersCanReadIsMadePrivate) {
  const TempDir temp;
  ASSERT_EQ(mkdir((temp / "run").c_str(), 0777), 0);
  ASSERT_EQ(chmod((temp / "run").c_str(), 0777), 0);
  RunFolder folder;
  ASSERT_TRUE(folder.create(temp / "run").ok());
  EXPECT_EQ(mode_of(temp / "run"), 0700u);
}

TEST(RunFolder, MayBeGivenWithATrailingSlash) {
  const TempDir temp;
  RunFolder folder;
  ASSERT_TRUE(folder.create(temp / "run/").ok());
  EXPECT_EQ(mode_of(temp / "run"), 0700u);
}

TEST(RunFolder, HeldByAnotherProcessIsRefusedNamingItsHostAndProcess) {
  const TempDir temp;
  const OtherRun other(temp / "run");
  RunFolder folder;
  const Status status = folder.create(temp / "run");
  EXPECT_EQ(status.code(), StatusCode::kUsage);
  char host[256] = "";
  gethostname(host, sizeof(host) - 1);
  EXPECT_TRUE(mentions(status.message(), std::string("host=") + host)) << status.message();
  EXPECT_TRUE(mentions(status.message(), "pid=" + std::to_string(other.pid()))) << status.message();
  EXPECT_TRUE(mentions(status.message(), temp / "run")) << status.message();
  // And a refused run leaves the holder's name alone.
  EXPECT_TRUE(mentions(read_file(temp / "run/lock"), "pid=" + std::to_string(other.pid())));
}

TEST(RunFolder, IsFreeAgainWhenItsHolderDiedWithoutARecord) {
  const TempDir temp;
  { const OtherRun dead(temp / "run"); }
  RunFolder folder;
  ASSERT_TRUE(folder.create(temp / "run").ok());
  EXPECT_TRUE(mentions(read_file(temp / "run/lock"), "pid=" + std::to_string(getpid())));
}

TEST(RunFolder, TwoInOneProcessExcludeEachOtherToo) {
  const TempDir temp;
  {
    RunFolder first;
    RunFolder second;
    ASSERT_TRUE(first.create(temp / "run").ok());
    EXPECT_EQ(second.create(temp / "run").code(), StatusCode::kUsage);
    RunFolder elsewhere;
    EXPECT_TRUE(elsewhere.create(temp / "other").ok());
  }
  RunFolder later;
  EXPECT_TRUE(later.create(temp / "run").ok());
}

TEST(RunFolder, WithTheRecordOfAnEarlierRunIsRefusedAndTheRecordKept) {
  const TempDir temp;
  ASSERT_EQ(mkdir((temp / "run").c_str(), 0700), 0);
  write_file(temp / "run/events.jsonl", "{\"event\":\"run_started\"}\n");
  RunFolder folder;
  const Status status = folder.create(temp / "run");
  EXPECT_EQ(status.code(), StatusCode::kUsage);
  EXPECT_TRUE(mentions(status.message(), "earlier run")) << status.message();
  EXPECT_EQ(read_file(temp / "run/events.jsonl"), "{\"event\":\"run_started\"}\n");
}

TEST(RunFolder, AFileInItsPlaceIsRefusedAndLeftAsItWas) {
  const TempDir temp;
  write_file(temp / "run", "not a folder");
  ASSERT_EQ(chmod((temp / "run").c_str(), 0644), 0);
  RunFolder folder;
  const Status status = folder.create(temp / "run");
  EXPECT_EQ(status.code(), StatusCode::kUsage);
  EXPECT_TRUE(mentions(status.message(), temp / "run")) << status.message();
  EXPECT_EQ(read_file(temp / "run"), "not a folder");
  EXPECT_EQ(mode_of(temp / "run"), 0644u);
}

TEST(RunFolder, AFileAmongItsParentsIsRefused) {
  const TempDir temp;
  write_file(temp / "file", "");
  RunFolder folder;
  const Status status = folder.create(temp / "file/run");
  EXPECT_EQ(status.code(), StatusCode::kUsage);
  EXPECT_TRUE(mentions(status.message(), temp / "file")) << status.message();
}

}  // namespace
}  // namespace holdfast
