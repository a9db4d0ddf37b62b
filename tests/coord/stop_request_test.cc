#include "holdfast/coord/stop_request.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <thread>
#include <vector>

#include "coord/temp_dir.h"

namespace holdfast {
namespace {

constexpr int kWriters = 4;
constexpr int kRequests = 200;

// Of different lengths, so that a mixture of two would show.
StopRequest request_of(int writer) {
  const std::string by(static_cast<std::size_t>(1 + 700 * writer), static_cast<char>('a' + writer));
  return {"host=h pid=1 run=1", by};
}

bool write_requests(const std::string& run_dir, int writer) {
  bool all = true;
  for (int i = 0; i < kRequests; ++i) all = write_stop_request(run_dir, request_of(writer)).ok() && all;
  return all;
}

// Reads what is there, as the run would, until `done`.
void expect_whole_requests(const std::string& run_dir, const std::atomic<bool>& done) {
  while (!done) {
    const auto request = take_stop_request(run_dir);
    if (!request) continue;
    const int writer = request->by.empty() ? -1 : request->by[0] - 'a';
    ASSERT_TRUE(writer >= 0 && writer < kWriters) << request->by;
    EXPECT_TRUE(request->by == request_of(writer).by) << request->by.size() << " bytes of writer " << writer;
    EXPECT_EQ(request->holder, request_of(writer).holder);
  }
}

void expect_nothing_but_the_request(const std::string& run_dir) {
  for (const auto& entry : std::filesystem::directory_iterator(run_dir)) {
    EXPECT_EQ(entry.path().filename(), "stop");
  }
}

TEST(StopRequest, OfSeveralThreadsAtOnceEachIsWrittenWhole) {
  const TempDir run_dir;
  std::atomic<bool> done = false;
  std::atomic<int> succeeded = 0;
  std::vector<std::thread> writers;
  for (int writer = 0; writer < kWriters; ++writer) {
    writers.emplace_back([&, writer] { succeeded += write_requests(run_dir.path(), writer) ? 1 : 0; });
  }
  std::thread reader([&] { expect_whole_requests(run_dir.path(), done); });
  for (std::thread& writer : writers) writer.join();
  done = true;
  reader.join();
  EXPECT_EQ(succeeded, kWriters);
  expect_nothing_but_the_request(run_dir.path());
}

TEST(StopRequest, OfSeveralProcessesAtOnceEachIsWrittenWhole) {
  const TempDir run_dir;
  std::vector<pid_t> writers;
  for (int writer = 0; writer < kWriters; ++writer) {
    writers.push_back(fork());
    ASSERT_GE(writers.back(), 0);
    if (writers.back() == 0) _exit(write_requests(run_dir.path(), writer) ? 0 : 1);
  }
  std::atomic<bool> done = false;
  std::thread reader([&] { expect_whole_requests(run_dir.path(), done); });
  for (const pid_t writer : writers) {
    int how = 0;
    EXPECT_EQ(waitpid(writer, &how, 0), writer);
    EXPECT_TRUE(WIFEXITED(how) && WEXITSTATUS(how) == 0) << how;
  }
  done = true;
  reader.join();
  expect_nothing_but_the_request(run_dir.path());
}

// Another host may have a process of our number, and one that was killed may have left its file.
TEST(StopRequest, ANameThatIsTakenIsPassedOverAndLeftAlone) {
  const TempDir run_dir;
  // Every second number, wherever the count stands: of two requests one meets a name that is taken.
  std::vector<std::string> taken;
  for (int i = 0; i < 2 * (kWriters * kRequests + 10); i += 2) {
    taken.push_back(run_dir / ("stop.new." + std::to_string(getpid()) + "." + std::to_string(i)));
    write_file(taken.back(), "theirs");
  }
  for (const int writer : {0, 1}) {
    const Status status = write_stop_request(run_dir.path(), request_of(writer));
    ASSERT_TRUE(status.ok()) << status.message();
    const auto request = take_stop_request(run_dir.path());
    ASSERT_TRUE(request.has_value());
    EXPECT_TRUE(request->by == request_of(writer).by);
  }
  for (const std::string& path : taken) ASSERT_EQ(read_file(path), "theirs");
}

}  // namespace
}  // namespace holdfast
