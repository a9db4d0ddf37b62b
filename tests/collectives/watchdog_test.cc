#include "holdfast/collectives/watchdog.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <thread>

namespace holdfast {
namespace {

using std::chrono::milliseconds;
using testing::ExitedWithCode;

void sleep_for(milliseconds time) { std::this_thread::sleep_for(time); }
void sleep_for_ever() { sleep_for(std::chrono::hours(1)); }

class WatchdogDeathTest : public testing::Test {
 protected:
  void SetUp() override { GTEST_FLAG_SET(death_test_style, "threadsafe"); }

  static Watchdog::Options options(milliseconds deadline, milliseconds tick = milliseconds(5)) {
    Watchdog::Options options;
    options.deadline = deadline;
    options.tick = tick;
    return options;
  }
};

TEST_F(WatchdogDeathTest, EndsAStuckProcessWith84AndSaysWhereItStood) {
  EXPECT_EXIT(
      {
        Watchdog watchdog(3, options(milliseconds(50)));
        watchdog.board().enter(5, 17, Phase::kObserve);
        sleep_for_ever();
      },
      ExitedWithCode(84),
      "^holdfast: rank 3 \\(host [^ ]+, pid [0-9]+\\) made no progress for 0\\.1 s: attempt 17 of epoch 5 "
      "stands at "
      "phase observe\\..*exit code 84\\.");
}

TEST_F(WatchdogDeathTest, NamesThePhaseThatIsStuck) {
  for (int p = 0; p < 5; ++p) {
    const auto phase = static_cast<Phase>(p);
    EXPECT_EXIT(
        {
          Watchdog watchdog(3, options(milliseconds(20)));
          watchdog.board().enter(1, 2, phase);
          sleep_for_ever();
        },
        ExitedWithCode(84), "attempt 2 of epoch 1 stands at phase " + std::string(phase_name(phase)));
  }
}

TEST_F(WatchdogDeathTest, ExpiresWhenNothingEverMoved) {
  EXPECT_EXIT(
      {
        Watchdog watchdog(3, options(milliseconds(20)));
        sleep_for_ever();
      },
      ExitedWithCode(84), "phase outside");
}

TEST_F(WatchdogDeathTest, LetsGoOnceBeforeItEndsTheProcess) {
  Watchdog::Options letting_go = options(milliseconds(50));
  letting_go.before_leaving = [] { std::fputs("let go\n", stderr); };
  EXPECT_EXIT(
      {
        Watchdog watchdog(3, letting_go);
        sleep_for_ever();
      },
      ExitedWithCode(84), "exit code 84\\.\nlet go\n$");
}

TEST_F(WatchdogDeathTest, LeavesWithItsExitCodeWhenLettingGoThrows) {
  Watchdog::Options throwing = options(milliseconds(50));
  throwing.before_leaving = [] { throw std::runtime_error("no such communicator"); };
  EXPECT_EXIT(
      {
        Watchdog watchdog(3, throwing);
        sleep_for_ever();
      },
      ExitedWithCode(84), "exit code 84\\.");
}

TEST_F(WatchdogDeathTest, DoesNotWaitForEverForWhatDoesNotLetGo) {
  Watchdog::Options stuck = options(milliseconds(50));
  stuck.before_leaving = sleep_for_ever;
  EXPECT_EXIT(
      {
        Watchdog watchdog(3, stuck);
        sleep_for_ever();
      },
      ExitedWithCode(84), "exit code 84\\.");
}

// ---- the transport

Watchdog::Options over_failing_transport(Watchdog::Options options) {
  options.health = [] { return Status(StatusCode::kRankMissing, "the cable is out"); };
  options.abort = [] { std::fputs("aborted\n", stderr); };
  return options;
}

TEST_F(WatchdogDeathTest, ATransportThatFailsIsToldOnceAbortedOnceAndLeftWhenTheTrainerDoesNotComeBy) {
  EXPECT_EXIT(
      {
        Watchdog watchdog(3, over_failing_transport(options(std::chrono::hours(1))));
        watchdog.board().enter(5, 17, Phase::kObserve);
        sleep_for_ever();
      },
      ExitedWithCode(84),
      "^holdfast: rank 3: the transport failed: the cable is out\naborted\n"
      "holdfast: rank 3 \\(host [^\n]+ attempt 17 of epoch 5 stands at phase observe\\. The transport "
      "failed: "
      "the cable is out\\. Leaving with exit code 84\\.\n$");
}

TEST_F(WatchdogDeathTest, ATransportThatThrowsWhenItIsAskedHasFailed) {
  Watchdog::Options throws = options(std::chrono::hours(1));
  throws.health = []() -> Status { throw std::runtime_error("no\nmemory"); };
  EXPECT_EXIT(
      {
        Watchdog watchdog(3, throws);
        sleep_for_ever();
      },
      ExitedWithCode(84), "rank 3: the transport failed: it cannot be asked how it is: no memory\n");
}

TEST_F(WatchdogDeathTest, ATrainerThatKnowsOfTheFailureEndsTheRunItself) {
  EXPECT_EXIT(
      {
        Watchdog watchdog(3, over_failing_transport(options(std::chrono::hours(1))));
        watchdog.group_failed("the cable is out");
        sleep_for(milliseconds(6'000));
        _exit(0);
      },
      ExitedWithCode(0), "aborted\n$");
}

TEST_F(WatchdogDeathTest, InAPauseATransportThatFailsIsAbortedAndNotYetLeft) {
  EXPECT_EXIT(
      {
        Watchdog watchdog(3, over_failing_transport(options(std::chrono::hours(1))));
        watchdog.board().pause();
        sleep_for(milliseconds(6'000));
        std::fputs("still alive\n", stderr);
        watchdog.board().resume();
        sleep_for_ever();
      },
      ExitedWithCode(84), "aborted\nstill alive\nholdfast: rank 3 ");
}

TEST_F(WatchdogDeathTest, AbortsTheTransportOnceBeforeItEndsTheProcessAndDoesNotWaitForEver) {
  Watchdog::Options stuck = options(milliseconds(50));
  stuck.abort = [] {
    std::fputs("aborting\n", stderr);
    sleep_for_ever();
  };
  EXPECT_EXIT(
      {
        Watchdog watchdog(3, stuck);
        sleep_for_ever();
      },
      ExitedWithCode(84), "exit code 84\\.\naborting\n$");
}

TEST(Watchdog, OfAHealthyTransportAsksAgainAndAgainAndAbortsNothing) {
  std::atomic<int> asked{0};
  std::atomic<int> aborted{0};
  Watchdog::Options options;
  options.deadline = std::chrono::hours(1);
  options.tick = milliseconds(1);
  options.health = [&] { return ++asked, Status(); };
  options.abort = [&] { ++aborted; };
  {
    Watchdog watchdog(0, options);
    for (int i = 0; i < 20'000 && asked < 50; ++i) sleep_for(milliseconds(1));
  }
  EXPECT_GE(asked, 50);
  EXPECT_EQ(aborted, 0);
}

// The collective may go when the watchdog has.
TEST(Watchdog, IsDestroyedOnlyWhenAnAbortIsDone) {
  std::atomic<bool> begun{false};
  std::atomic<bool> ended{false};
  Watchdog::Options options = over_failing_transport({});
  options.deadline = std::chrono::hours(1);
  options.abort = [&] {
    begun = true;
    sleep_for(milliseconds(500));
    ended = true;
  };
  {
    Watchdog watchdog(0, options);
    for (int i = 0; i < 20'000 && !begun; ++i) sleep_for(milliseconds(1));
  }
  EXPECT_TRUE(ended);
}

// ---- progress

TEST_F(WatchdogDeathTest, ProgressKeepsTheProcessAliveBeyondTheDeadline) {
  EXPECT_EXIT(
      {
        Watchdog watchdog(3, options(milliseconds(1000), milliseconds(20)));
        for (std::uint64_t attempt = 0; attempt < 100; ++attempt) {
          watchdog.board().enter(1, attempt, Phase::kBegin);
          sleep_for(milliseconds(20));
        }
        _exit(0);
      },
      ExitedWithCode(0), "");
}

// The same phase of the same attempt, entered again: a long attempt that observes many tensors moves.
TEST_F(WatchdogDeathTest, RepeatingTheSamePhaseIsProgress) {
  EXPECT_EXIT(
      {
        Watchdog watchdog(3, options(milliseconds(1000), milliseconds(20)));
        for (int tensor = 0; tensor < 100; ++tensor) {
          watchdog.board().enter(1, 1, Phase::kObserve);
          sleep_for(milliseconds(20));
        }
        _exit(0);
      },
      ExitedWithCode(0), "");
}

TEST_F(WatchdogDeathTest, NoTickCountsWhilePaused) {
  EXPECT_EXIT(
      {
        Watchdog watchdog(3, options(milliseconds(200)));
        watchdog.board().pause();
        sleep_for(milliseconds(800));
        _exit(0);
      },
      ExitedWithCode(0), "");
}

TEST_F(WatchdogDeathTest, PausesNestAndTheLastResumeStartsTheClockAgain) {
  EXPECT_EXIT(
      {
        Watchdog watchdog(3, options(milliseconds(200)));
        watchdog.board().pause();
        watchdog.board().pause();
        watchdog.board().resume();
        sleep_for(milliseconds(800));
        std::fputs("still alive\n", stderr);
        watchdog.board().resume();
        sleep_for_ever();
      },
      ExitedWithCode(84), "still alive.*made no progress");
}

// A deadline below a tick is one tick, not none: a paused watchdog never fires.
TEST_F(WatchdogDeathTest, ADeadlineBelowATickStillWaitsWhilePaused) {
  EXPECT_EXIT(
      {
        Watchdog watchdog(3, options(milliseconds(1), milliseconds(100)));
        watchdog.board().pause();
        sleep_for(milliseconds(500));
        _exit(0);
      },
      ExitedWithCode(0), "");
}

TEST_F(WatchdogDeathTest, NothingFiresAfterItsDestruction) {
  EXPECT_EXIT(
      {
        { Watchdog watchdog(3, options(milliseconds(500))); }
        sleep_for(milliseconds(1200));
        _exit(0);
      },
      ExitedWithCode(0), "");
}

TEST(Watchdog, DestructionDoesNotWaitForTheNextTick) {
  const auto start = std::chrono::steady_clock::now();
  Watchdog::Options slow;
  slow.deadline = std::chrono::hours(2);
  slow.tick = std::chrono::hours(1);
  { Watchdog watchdog(0, slow); }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::minutes(1));
}

TEST(Watchdog, AMachineThatWasSuspendedBeyondTheDeadlineIsNotStuck) {
  int go[2];
  ASSERT_EQ(pipe(go), 0);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    Watchdog::Options options;
    options.deadline = milliseconds(2000);
    options.tick = milliseconds(20);
    Watchdog watchdog(0, options);
    char byte = 0;
    _exit(read(go[0], &byte, 1) == 1 ? 0 : 1);
  }
  int state = 0;
  kill(child, SIGSTOP);
  ASSERT_EQ(waitpid(child, &state, WUNTRACED), child);
  ASSERT_TRUE(WIFSTOPPED(state));
  sleep_for(milliseconds(3000));
  kill(child, SIGCONT);
  ASSERT_EQ(write(go[1], "x", 1), 1);
  ASSERT_EQ(waitpid(child, &state, 0), child);
  close(go[0]);
  close(go[1]);
  EXPECT_TRUE(WIFEXITED(state));
  EXPECT_EQ(WEXITSTATUS(state), 0);
}

}  // namespace
}  // namespace holdfast
