#include "holdfast/coord/storage/background_writer.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <future>
#include <memory>
#include <vector>

namespace holdfast {
namespace {

using std::chrono::milliseconds;

// A job that waits until it is let go.
class Gate {
 public:
  std::function<void()> job() {
    return [this] {
      begun_.set_value();
      open_.get_future().wait();
    };
  }
  void wait_until_begun() { begun_.get_future().wait(); }
  void open() { open_.set_value(); }

 private:
  std::promise<void> begun_;
  std::promise<void> open_;
};

TEST(BackgroundWriterTest, JobsRunInTheirOrderAndOneAtATime) {
  std::vector<int> ran, expected;
  BackgroundWriter writer(7);
  for (int i = 0; i < 1000; ++i) {
    writer.submit([&ran, i] { ran.push_back(i); });
    expected.push_back(i);
  }
  writer.wait();
  EXPECT_EQ(ran, expected);
}

TEST(BackgroundWriterTest, JobsRunOnAnotherThreadThatIsTheSameForAll) {
  std::vector<std::thread::id> ran;
  BackgroundWriter writer;
  for (int i = 0; i < 3; ++i) writer.submit([&ran] { ran.push_back(std::this_thread::get_id()); });
  writer.wait();
  EXPECT_NE(ran[0], std::this_thread::get_id());
  EXPECT_EQ(ran, std::vector(3, ran[0]));
}

TEST(BackgroundWriterTest, SubmitReturnsWhileTheJobRuns) {
  Gate gate;
  BackgroundWriter writer;
  EXPECT_TRUE(writer.idle());
  writer.submit(gate.job());
  EXPECT_FALSE(writer.idle());
  gate.wait_until_begun();
  EXPECT_FALSE(writer.idle());
  writer.submit([] {});  // one may wait
  gate.open();
  writer.wait();
  EXPECT_TRUE(writer.idle());
}

// With n waiting, the next submit() does not return before one of them has begun.
void expect_that_the_next_waits(std::size_t most_waiting, std::size_t n) {
  Gate gate;
  std::atomic<bool> submitted = false;
  std::atomic<int> ran = 0;
  BackgroundWriter writer(most_waiting);
  writer.submit(gate.job());
  gate.wait_until_begun();
  for (std::size_t i = 0; i < n; ++i) writer.submit([&ran] { ++ran; });
  std::thread next([&] {
    writer.submit([&ran] { ++ran; });
    submitted = true;
  });
  std::this_thread::sleep_for(milliseconds(100));
  EXPECT_FALSE(submitted);
  gate.open();
  next.join();
  writer.wait();
  EXPECT_EQ(ran, static_cast<int>(n) + 1);
}

TEST(BackgroundWriterTest, WhoSubmitsMoreThanMayWaitIsHeldUp) {
  expect_that_the_next_waits(1, 1);
  expect_that_the_next_waits(3, 3);
}

TEST(BackgroundWriterTest, AtLeastOneMayWait) { expect_that_the_next_waits(0, 1); }

TEST(BackgroundWriterTest, WaitingForAJobThatHangsEndsInTime) {
  Gate gate;
  BackgroundWriter writer;
  EXPECT_TRUE(writer.wait_for(milliseconds(0)));
  writer.submit(gate.job());
  const auto begun = std::chrono::steady_clock::now();
  EXPECT_FALSE(writer.wait_for(milliseconds(50)));
  EXPECT_GE(std::chrono::steady_clock::now() - begun, milliseconds(50));
  EXPECT_FALSE(writer.wait_for(milliseconds(-1)));
  gate.open();
  EXPECT_TRUE(writer.wait_for(std::chrono::minutes(1)));
}

TEST(BackgroundWriterTest, WaitWaitsForThoseThatWaitToo) {
  int ran = 0;
  BackgroundWriter writer(2);
  for (int i = 0; i < 3; ++i) {
    writer.submit([&ran] {
      std::this_thread::sleep_for(milliseconds(20));
      ++ran;
    });
  }
  writer.wait();
  EXPECT_EQ(ran, 3);
}

TEST(BackgroundWriterTest, TheEndWaitsForAllJobs) {
  int ran = 0;
  {
    BackgroundWriter writer(3);
    for (int i = 0; i < 3; ++i) {
      writer.submit([&ran] {
        std::this_thread::sleep_for(milliseconds(20));
        ++ran;
      });
    }
  }
  EXPECT_EQ(ran, 3);
  const BackgroundWriter never_used;
}

TEST(BackgroundWriterTest, WhatAJobHoldsIsGoneWhenItIsDone) {
  BackgroundWriter writer;
  auto held = std::make_shared<int>(1);
  writer.submit([held] {});
  writer.wait();
  EXPECT_EQ(held.use_count(), 1);
}

// A process that may have no further thread still gets its work done.
TEST(BackgroundWriterTest, WithoutAThreadTheJobIsRunBySubmit) {
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const rlimit none = {0, 0};
    if (setrlimit(RLIMIT_NPROC, &none) != 0) _exit(2);
    if (geteuid() == 0 && setuid(65534) != 0) _exit(3);  // root has no limit
    try {
      std::thread([] {}).join();
      _exit(4);
    } catch (const std::system_error&) {
    }
    bool ran = false;
    BackgroundWriter writer;
    writer.submit([&ran] { ran = true; });
    _exit(ran && writer.idle() ? 0 : 1);
  }
  int how = 0;
  ASSERT_EQ(waitpid(child, &how, 0), child);
  ASSERT_TRUE(WIFEXITED(how)) << how;
  if (WEXITSTATUS(how) == 4) GTEST_SKIP() << "the system gives threads beyond the limit";
  EXPECT_EQ(WEXITSTATUS(how), 0);
}

}  // namespace
}  // namespace holdfast
