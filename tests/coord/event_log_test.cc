#include "holdfast/coord/event_log.h"

#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmath>
#include <limits>

#include "coord/events.h"
#include "coord/file_size_limit.h"

namespace holdfast {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

// Field case 28.
TEST(EventLog, NanAndTheInfinitiesAreThreeDistinctStringsInStrictJson) {
  const TempDir folder;
  EventLog log;
  ASSERT_TRUE(log.open(folder / "events.jsonl").ok());
  const Json fields = {{"nan", json_number(kNan)},
                       {"minus_nan", json_number(std::copysign(kNan, -1.0))},
                       {"inf", json_number(kInf)},
                       {"minus_inf", json_number(-kInf)},
                       {"largest", json_number(1.7976931348623157e308)},
                       {"smallest", json_number(-5e-324)}};
  ASSERT_TRUE(log.append("report", fields).ok());

  const std::vector<Json> events = read_events(folder.path());
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0]["nan"], "nan");
  EXPECT_EQ(events[0]["minus_nan"], "nan");
  EXPECT_EQ(events[0]["inf"], "inf");
  EXPECT_EQ(events[0]["minus_inf"], "-inf");
  EXPECT_EQ(events[0]["largest"].get<double>(), 1.7976931348623157e308);
  EXPECT_EQ(events[0]["smallest"].get<double>(), -5e-324);
}

TEST(EventLog, AnEventBeginsWithItsNameAndTimeAndKeepsItsFieldsInOrder) {
  const TempDir folder;
  EventLog log;
  ASSERT_TRUE(log.open(folder / "events.jsonl").ok());
  ASSERT_TRUE(log.append("attempt_skipped", {{"zulu", 1}, {"alpha", 18446744073709551615u}}).ok());
  const std::vector<Json> events = read_events(folder.path());
  ASSERT_EQ(events.size(), 1u);
  std::vector<std::string> keys;
  for (const auto& [key, value] : events[0].items()) keys.push_back(key);
  EXPECT_EQ(keys, (std::vector<std::string>{"event", "time", "zulu", "alpha"}));
  EXPECT_EQ(events[0]["event"], "attempt_skipped");
  EXPECT_EQ(events[0]["alpha"].get<std::uint64_t>(), 18446744073709551615u);
}

// A pipe without a reader would hold the caller up, /dev/zero would swallow what is written.
TEST(EventLog, OneThatIsNoFileIsRefusedAtOnceAndEachLineIsLostForThatReason) {
  const TempDir folder;
  const std::string pipe = folder / "pipe";
  const std::string swallows = folder / "swallows";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  ASSERT_EQ(symlink("/dev/zero", swallows.c_str()), 0);
  for (const std::string& path : {pipe, swallows}) {
    EventLog log;
    EXPECT_EQ(log.open(path).message(), "cannot open " + path + ": not a file");
    EXPECT_EQ(log.append("dropped", {{"attempt", 5}}).message(), path + ": not a file");
    EXPECT_EQ(log.lost_events(), 1u);
  }
}

TEST(EventLog, TimeIsUtcWithMilliseconds) {
  const std::string time = utc_time();
  ASSERT_EQ(time.size(), 24u) << time;
  const std::string pattern = "dddd-dd-ddTdd:dd:dd.dddZ";
  for (std::size_t i = 0; i < pattern.size(); ++i) {
    if (pattern[i] == 'd') {
      EXPECT_TRUE(time[i] >= '0' && time[i] <= '9') << time;
    } else {
      EXPECT_EQ(time[i], pattern[i]) << time;
    }
  }
}

TEST(EventLog, AnyNameOfATensorStaysOnOneLineOfPrintableAscii) {
  const TempDir folder;
  EventLog log;
  ASSERT_TRUE(log.open(folder / "events.jsonl").ok());
  const std::string readable[] = {"two\nlines",        "a \"quote\"", "back\\slash",
                                  "\x1b[31mred",       "tab\tand\r",  std::string("nul\0!", 5),
                                  "\xc3\xa9t\xc3\xa9", "\x7f"};
  for (const std::string& name : readable) ASSERT_TRUE(log.append("e", {{"tensor", name}}).ok());
  const std::string garbage[] = {"\xff\xfe", "cut \xc3", "\xed\xa0\x80", "\xf8\x88\x80\x80\x80"};
  for (const std::string& name : garbage) ASSERT_TRUE(log.append("e", {{"tensor", name}, {"after", 1}}).ok());

  std::string text = read_file(folder / "events.jsonl");
  std::erase(text, '\x7f');  // the one byte that JSON does not ask to be escaped
  const std::vector<Json> events = parse_events(text);
  ASSERT_EQ(events.size(), std::size(readable) + std::size(garbage));
  for (std::size_t i = 0; i + 1 < std::size(readable); ++i) EXPECT_EQ(events[i]["tensor"], readable[i]);
  for (std::size_t i = std::size(readable); i < events.size(); ++i) {
    EXPECT_NE(events[i]["tensor"].get<std::string>().find("\xef\xbf\xbd"), std::string::npos);  // U+FFFD
    EXPECT_EQ(events[i]["after"], 1);
  }
}

TEST(EventLog, IsForItsOwnerOnly) {
  const TempDir folder;
  EventLog log;
  ASSERT_TRUE(log.open(folder / "events.jsonl").ok());
  struct stat info = {};
  ASSERT_EQ(stat((folder / "events.jsonl").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
}

TEST(EventLog, GoesOnAtTheEndOfAnExistingFile) {
  const TempDir folder;
  for (int run = 0; run < 3; ++run) {
    EventLog log;
    ASSERT_TRUE(log.open(folder / "events.jsonl").ok());
    ASSERT_TRUE(log.append("e", {{"run", run}}).ok());
  }
  EXPECT_EQ(read_events(folder.path()).size(), 3u);
}

TEST(EventLog, SaysWhyItCannotBeOpened) {
  const TempDir folder;
  EventLog log;
  const Status status = log.open(folder / "nowhere/events.jsonl");
  EXPECT_EQ(status.code(), StatusCode::kInternal);
  EXPECT_NE(status.message().find("nowhere/events.jsonl: No such file"), std::string::npos)
      << status.message();
  EXPECT_FALSE(log.append("e", Json::object()).ok());  // and stays harmless
  EXPECT_EQ(log.lost_events(), 1u);
}

// What is written to stderr, kept in a pipe and not in a file, which would be under the limit too.
class PipedStderr {
 public:
  PipedStderr() : stderr_(dup(STDERR_FILENO)) {
    EXPECT_EQ(pipe(pipe_), 0);
    dup2(pipe_[1], STDERR_FILENO);
    close(pipe_[1]);
  }
  std::string text() {
    dup2(stderr_, STDERR_FILENO);
    close(stderr_);
    char buffer[4096];
    const ssize_t n = read(pipe_[0], buffer, sizeof(buffer));
    close(pipe_[0]);
    return std::string(buffer, n > 0 ? static_cast<std::size_t>(n) : 0);
  }

 private:
  const int stderr_;
  int pipe_[2];
};

// Field case 27, as far as events go.
TEST(EventLog, AFullDiskLeavesNoHalfLineAndWritingGoesOnWhenThereIsRoomAgain) {
  const TempDir folder;
  EventLog log;
  ASSERT_TRUE(log.open(folder / "events.jsonl").ok());
  ASSERT_TRUE(log.append("before", {{"n", 1}}).ok());
  const std::string before = read_file(folder / "events.jsonl");
  Status first;
  Status second;
  std::string during;
  PipedStderr captured;
  {
    const FileSizeLimit limit(before.size() + 30);  // room for half a line
    first = log.append("lost", {{"text", std::string(200, 'x')}});
    second = log.append("lost too", Json::object());
    during = read_file(folder / "events.jsonl");
  }
  const std::string said = captured.text();
  EXPECT_EQ(first.code(), StatusCode::kInternal);
  EXPECT_NE(first.message().find("File too large"), std::string::npos) << first.message();
  EXPECT_EQ(second.code(), StatusCode::kInternal);
  EXPECT_EQ(during, before);
  EXPECT_EQ(log.lost_events(), 2u);
  EXPECT_NE(said.find("\"event\":\"lost\""), std::string::npos) << said;
  EXPECT_EQ(said.find("lost too"), std::string::npos) << said;  // said once

  EXPECT_TRUE(log.append("after", {{"n", 2}}).ok());
  const std::vector<Json> events = read_events(folder.path());
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[1]["event"], "after");
}

TEST(EventLog, ARealFileSystemWithoutRoomIsSurvivedToo) {
  const TempDir folder;
  if (mount("tmpfs", folder.path().c_str(), "tmpfs", 0, "size=64k") != 0) GTEST_SKIP() << "may not mount";
  {
    EventLog log;
    ASSERT_TRUE(log.open(folder / "events.jsonl").ok());
    testing::internal::CaptureStderr();
    Status status;
    int written = 0;
    for (; status.ok() && written < 1000; ++written)
      status = log.append("fill", {{"text", std::string(999, 'x')}});
    testing::internal::GetCapturedStderr();
    EXPECT_NE(status.message().find("No space left"), std::string::npos) << status.message();
    EXPECT_EQ(read_events(folder.path()).size(), static_cast<std::size_t>(written - 1));
    ASSERT_EQ(truncate((folder / "events.jsonl").c_str(), 0), 0);
    EXPECT_TRUE(log.append("after", Json::object()).ok());
    EXPECT_EQ(read_events(folder.path()).size(), 1u);
  }
  EXPECT_EQ(umount(folder.path().c_str()), 0);
}

}  // namespace
}  // namespace holdfast
