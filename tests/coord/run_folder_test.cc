#include "holdfast/coord/run_folder.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <set>

#include "coord/temp_dir.h"
#include "holdfast/coord/stop_request.h"

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

// Starts a replacement of RUN_DIR/stop in another process, which is killed before it is in its place.
void leave_half_written(const std::string& run_dir) {
  const pid_t writer = fork();
  if (writer == 0) {
    const rlimit nothing = {0, 0};
    const rlimit no_core = {0, 0};
    setrlimit(RLIMIT_CORE, &no_core);
    setrlimit(RLIMIT_FSIZE, &nothing);  // the first byte that is written ends it: SIGXFSZ
    static_cast<void>(write_stop_request(run_dir, {"holder", "by"}));
    _exit(0);
  }
  int how = 0;
  EXPECT_EQ(waitpid(writer, &how, 0), writer);
  EXPECT_TRUE(WIFSIGNALED(how)) << how;
}

std::set<std::string> files_in(const std::string& folder) {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) names.insert(entry.path().filename());
  return names;
}

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

TEST(RunFolder, WhoHoldsItClearsWhatKilledWritersLeft) {
  const TempDir temp;
  const std::string run_dir = temp / "run";
  { const OtherRun killed(run_dir); }
  leave_half_written(run_dir);
  ASSERT_EQ(files_in(run_dir).size(), 2u) << "a file was left beside the lock";
  write_file(run_dir + "/metrics.prom.new.12.0", "half");
  // Names that are not such, and those of the run's memory, which has its own way.
  const std::set<std::string> others = {
      "events.jsonl",  "x.new.1",  "x.new.1.",     "x.new..1",
      "x.new.1.2.txt", ".new.1.2", "x.old.new1.2", "state.new.0123456789abcdef"};
  for (const std::string& name : others) write_file(run_dir + "/" + name, "{}\n");
  std::set<std::string> left = others;
  left.insert("lock");
  {
    RunFolder folder;
    ASSERT_TRUE(folder.open(run_dir).ok());
    EXPECT_EQ(files_in(run_dir), left);
    leave_half_written(run_dir);
    RunFolder refused;
    EXPECT_FALSE(refused.open(run_dir).ok());
    EXPECT_EQ(files_in(run_dir).size(), left.size() + 1) << "not by one that does not get the folder";
  }
  std::filesystem::remove(run_dir + "/events.jsonl");
  RunFolder folder;
  ASSERT_TRUE(folder.create(run_dir).ok());
  left.erase("events.jsonl");
  EXPECT_EQ(files_in(run_dir), left);
}

TEST(RunFolder, WhileItsHolderHasNotWrittenItsNameThatIsUnknown) {
  const TempDir temp;
  RunFolder folder;
  ASSERT_TRUE(folder.create(temp / "run").ok());
  EXPECT_EQ(RunFolder::live_holder(temp / "run"), folder.holder());
  EXPECT_TRUE(is_holder(folder.holder(), folder.holder().substr(5, folder.holder().find(' ') - 5), getpid()));
  EXPECT_FALSE(
      is_holder(folder.holder(), folder.holder().substr(5, folder.holder().find(' ') - 5), getpid() / 10));
  write_file(temp / "run/lock", "");
  EXPECT_EQ(RunFolder::live_holder(temp / "run"), "");
  write_file(temp / "run/lock", folder.holder().substr(0, 9));
  EXPECT_EQ(RunFolder::live_holder(temp / "run"), "");
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
