// How a run begins and how it ends, on every rank alike.
#include <gtest/gtest.h>

#include <stdexcept>
#include <thread>

#include "coord/events.h"
#include "ranks/guarded_ranks.h"

namespace holdfast {
namespace {

// StepGuard::create on four ranks, with options by rank: the status of each.
std::vector<Status> create_on_four(const std::function<GuardOptions(int)>& options) {
  std::vector<Status> statuses(4);
  ThreadGroup(4).run([&](Collective& collective) {
    std::unique_ptr<StepGuard> guard;
    auto& mine = statuses[static_cast<std::size_t>(collective.rank())];
    mine = StepGuard::create(collective, options(collective.rank()), &guard);
    EXPECT_EQ(guard != nullptr, mine.ok());
  });
  return statuses;
}

TEST(StepGuardCreate, ABadPolicyOnOneRankIsAUsageErrorOnAll) {
  for (const Status& status :
       create_on_four([](int rank) { return guard_options(rank == 2 ? "max_skips: 1" : ""); })) {
    EXPECT_EQ(status.code(), StatusCode::kUsage);
    EXPECT_TRUE(mentions(status.message(), "rank 2: ")) << status.message();
    EXPECT_TRUE(mentions(status.message(), "max_skips")) << status.message();
  }
}

TEST(StepGuardCreate, ARunFolderThatRank0CannotHaveIsAUsageErrorOnAll) {
  const TempDir temp;
  write_file(temp / "file", "");
  for (const Status& status : create_on_four([&](int) { return guard_options("", temp / "file/run"); })) {
    EXPECT_EQ(status.code(), StatusCode::kUsage);
    EXPECT_TRUE(mentions(status.message(), "rank 0: ")) << status.message();
  }
}

TEST(StepGuardCreate, TheRecordOfAnEarlierRunIsNotWrittenOn) {
  const TempDir temp;
  for (const Status& status : create_on_four([&](int) { return guard_options("", temp / "run"); })) {
    EXPECT_TRUE(status.ok());
  }
  const std::string before = read_file(temp / "run/events.jsonl");
  for (const Status& status : create_on_four([&](int) { return guard_options("", temp / "run"); })) {
    EXPECT_EQ(status.code(), StatusCode::kUsage);
    EXPECT_TRUE(mentions(status.message(), "earlier run")) << status.message();
  }
  EXPECT_EQ(read_file(temp / "run/events.jsonl"), before);
}

TEST(StepGuardCreate, RanksWithDifferentPoliciesLeaveWith83NamingTheOddOne) {
  Decisions decisions(4);
  ThreadGroup(4).run([&](Collective& collective) {
    const int rank = collective.rank();
    const auto guard = create_guard(collective, guard_options(rank == 2 ? "max_total_skips: 7" : ""));
    decisions.add(rank, attempt(*guard, [] {}));
  });
  EXPECT_EQ(decisions.agreed_actions(), Actions{"ABORT 83"});
  EXPECT_TRUE(mentions(decisions.agreed()[0].reason, "rank 2 at")) << decisions.agreed()[0].reason;
  EXPECT_TRUE(mentions(decisions.agreed()[0].reason, "rank 0,1,3 at")) << decisions.agreed()[0].reason;
}

TEST(StepGuardCreate, TheSamePolicyInOtherWordsIsTheSame) {
  Decisions decisions(2);
  ThreadGroup(2).run([&](Collective& collective) {
    const char* policy =
        collective.rank() == 0 ? "on_error: SKIP" : R"({"on_error": "SKIP", "max_total_skips": 100})";
    const auto guard = create_guard(collective, guard_options(policy));
    decisions.add(collective.rank(), attempt(*guard, [] {}));
  });
  EXPECT_EQ(decisions.agreed_actions(), Actions{"APPLY"});
}

TEST(StepGuardEnd, ARankAtAnotherAttemptThanItsPeersIsDisagreement) {
  const TempDir temp;
  for (const int ahead : {0, 3}) {
    Decisions decisions(4);
    const std::string run_dir = temp / std::to_string(ahead);
    run_guarded(4, guard_options("", run_dir), [&](StepGuard& guard, int rank) {
      decisions.add(rank, attempt(guard, [] {}));
      if (rank == ahead) {  // an attempt that its peers know nothing of
        guard.begin();
        guard.finish();
      }
      decisions.add(rank, attempt(guard, [] {}));
    });
    EXPECT_EQ(decisions.agreed_actions(), (Actions{"APPLY", "ABORT 83"}));
    EXPECT_TRUE(
        mentions(decisions.agreed()[1].reason, "rank " + std::to_string(ahead) + " at epoch 1, attempt 2"))
        << decisions.agreed()[1].reason;
    EXPECT_EQ(events_named(run_dir, "aborted").at(0)["exit_code"], 83);
  }
}

TEST(StepGuardEnd, AnUpdateThatFailsOnOneRankEndsTheNextAttemptWith83OnAll) {
  const TempDir temp;
  Decisions decisions(4);
  run_guarded(4, guard_options("on_error: SKIP", temp / "run"), [&](StepGuard& guard, int rank) {
    for (int a = 0; a < 2; ++a) {
      decisions.add(rank, attempt(
                              guard, [&] { guard.observe_loss(1); },
                              [&] {
                                if (rank == 2) throw std::runtime_error("out of memory");
                              }));
    }
  });
  EXPECT_EQ(decisions.agreed_actions(), (Actions{"APPLY", "ABORT 83"}));
  EXPECT_TRUE(mentions(decisions.agreed()[1].reason, "rank 2")) << decisions.agreed()[1].reason;
  EXPECT_TRUE(mentions(decisions.agreed()[1].reason, "out of memory")) << decisions.agreed()[1].reason;
  const Json event = events_named(temp / "run", "aborted").at(0);
  EXPECT_EQ(event["exit_code"], 83);
  EXPECT_EQ(event["error"]["rank"], 2);
  EXPECT_EQ(event["error"]["stage"], "optimizer");
}

TEST(StepGuardEnd, AnUpdateThatFailsInTheLastAttemptIsFoundByClose) {
  for (const int failing : {0, 3}) {
    const TempDir temp;
    Decisions closed(4);
    run_guarded(4, guard_options("", temp / "run"), [&](StepGuard& guard, int rank) {
      attempt(
          guard, [] {},
          [&] {
            if (rank == failing) throw 1;
          });
      closed.add(rank, guard.close());
    });
    EXPECT_EQ(closed.agreed_actions(), Actions{"ABORT 83"});
    EXPECT_TRUE(mentions(closed.agreed()[0].reason, "rank " + std::to_string(failing)))
        << closed.agreed()[0].reason;
    EXPECT_TRUE(events_named(temp / "run", "run_finished").empty());
    EXPECT_EQ(events_named(temp / "run", "aborted").at(0)["exit_code"], 83);
  }
}

TEST(StepGuardEnd, ACleanRunClosesCleanAndIsOnRecordFromStartToEnd) {
  const TempDir temp;
  run_guarded(4, guard_options("", temp / "run"), [](StepGuard& guard, int rank) {
    for (int a = 0; a < 5; ++a) attempt(guard, [&] { guard.observe_loss(a == 1 && rank == 0 ? kNanF : 1); });
    const Decision decision = guard.close();
    EXPECT_TRUE(decision.apply()) << decision.reason;
    EXPECT_EQ(decision.exit_code(), 0);
  });
  const std::vector<Json> events = read_events(temp / "run");
  ASSERT_EQ(events.size(), 3u);
  EXPECT_EQ(events[0]["event"], "run_started");
  EXPECT_EQ(events[0]["ranks"], 4);
  EXPECT_EQ(events[1]["event"], "attempt_skipped");
  EXPECT_EQ(events[2]["event"], "run_finished");
  EXPECT_EQ(events[2]["attempt"], 5);
  EXPECT_EQ(events[2]["update"], 4);
  EXPECT_EQ(events[2]["skips"], 1);
}

TEST(StepGuardEnd, ARunWithoutAnyAttemptClosesClean) {
  run_guarded(2, guard_options(), [](StepGuard& guard, int) { EXPECT_TRUE(guard.close().apply()); });
}

TEST(StepGuardEnd, AStopThatAnyRankAsksForStopsAllWith86AndWithoutAnUpdate) {
  for (const int asking : {0, 2}) {
    const TempDir temp;
    Decisions decisions(4);
    run_guarded(4, guard_options("", temp / "run"), [&](StepGuard& guard, int rank) {
      for (int a = 0; a < 2; ++a) {
        decisions.add(rank, attempt(guard, [&] {
                        if (rank == asking && a == 1) guard.request_stop();
                      }));
      }
      EXPECT_EQ(guard.updates(), 1u);
      EXPECT_EQ(guard.skips(), 0u);
    });
    EXPECT_EQ(decisions.agreed_actions(), (Actions{"APPLY", "STOP 86"}));
    EXPECT_TRUE(decisions.agreed()[1].ends_run());
    EXPECT_EQ(events_named(temp / "run", "stopped").size(), 1u);
  }
}

// "At the end of this attempt": a bad attempt ends too, and an operator asks once.
TEST(StepGuardEnd, AStopAskedForInABadAttemptIsNotForgotten) {
  Decisions decisions(2);
  run_guarded(2, guard_options(), [&](StepGuard& guard, int rank) {
    for (int a = 0; a < 2; ++a) {
      decisions.add(rank, attempt(guard, [&] {
                      if (rank == 1 && a == 0) guard.request_stop();
                      guard.observe_loss(rank == 0 && a == 0 ? kNanF : 1);
                    }));
      if (decisions.of(rank).back().ends_run()) break;
    }
  });
  EXPECT_EQ(decisions.agreed_actions().back(), "STOP 86");
}

// Field case 15: an agreed end, announced one attempt early, and never read as "finite".
TEST(StepGuardEnd, WhenOneRankRunsDryEveryRankIsToldInItsLastAttempt) {
  Decisions decisions(4);
  run_guarded(4, guard_options(), [&](StepGuard& guard, int rank) {
    const int batches = rank == 0 ? 3 : 4;
    for (int a = 0; a < batches; ++a) {
      decisions.add(rank, attempt(guard, [&] {
                      if (a + 1 == batches) guard.no_next_batch();
                    }));
      if (decisions.of(rank).back().last_attempt_with_data) break;
    }
    EXPECT_TRUE(guard.close().apply());
    EXPECT_EQ(guard.attempt(), 3u);
    EXPECT_EQ(guard.updates(), 3u);
  });
  EXPECT_EQ(decisions.agreed_actions(), Actions(3, "APPLY"));
  EXPECT_FALSE(decisions.agreed()[1].last_attempt_with_data);
  EXPECT_TRUE(decisions.agreed()[2].last_attempt_with_data);
}

TEST(StepGuardEnd, TheEndOfTheDataIsToldWithASkipToo) {
  Decisions decisions(3);
  run_guarded(3, guard_options(), [&](StepGuard& guard, int rank) {
    decisions.add(rank, attempt(guard, [&] {
                    if (rank == 2) guard.no_next_batch();
                    guard.observe_loss(rank == 1 ? kNanF : 1);
                  }));
  });
  EXPECT_EQ(decisions.agreed_actions(), Actions{"SKIP"});
  EXPECT_TRUE(decisions.agreed()[0].last_attempt_with_data);
}

GuardOptions watched() {
  GuardOptions options = guard_options("attempt_deadline_seconds: 0.5 side_channel: false");
  options.watchdog = true;
  return options;
}

class StepGuardWatchdogDeathTest : public testing::Test {
 protected:
  void SetUp() override { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
};

TEST_F(StepGuardWatchdogDeathTest, ARankThatNeverComesEndsTheProcessWith84) {
  EXPECT_EXIT(ThreadGroup(2).run([](Collective& collective) {
    const auto guard = create_guard(collective, watched());
    attempt(*guard, [] {});
    attempt(*guard, [&] {
      if (collective.rank() == 1) std::this_thread::sleep_for(std::chrono::hours(1));
    });
  }),
              testing::ExitedWithCode(84),
              "made no progress for 0\\.5 s: attempt 1 of epoch 1 stands at phase");
}

TEST_F(StepGuardWatchdogDeathTest, APausedWatchdogWaits) {
  EXPECT_EXIT(ThreadGroup(1).run([](Collective& collective) {
    const auto guard = create_guard(collective, watched());
    guard->pause_watchdog();
    std::this_thread::sleep_for(std::chrono::milliseconds(1500));
    guard->resume_watchdog();
    _exit(attempt(*guard, [] {}).apply() ? 0 : 1);
  }),
              testing::ExitedWithCode(0), "");
}

// There is no attempt left to skip.
TEST(StepGuardClose, ABufferThatTheLastUpdateSpoiltEndsTheRunWith85) {
  const TempDir temp;
  Decisions decisions(2);
  run_guarded(2, guard_options(kSkipAnything, temp / "run"), [&](StepGuard& guard, int rank) {
    std::vector<float> statistics = {1, 2};
    guard.protect("statistics", statistics.data(), DType::kFloat32, 2);
    decisions.add(rank, attempt(
                            guard, [] {}, [&] { statistics[1] = kNanF; }));
    decisions.add(rank, guard.close());
  });
  ASSERT_EQ(decisions.agreed_actions(), (Actions{"APPLY", "ABORT 85"}));
  EXPECT_EQ(decisions.agreed()[1].exit_code(), 85);
  EXPECT_TRUE(mentions(decisions.agreed()[1].reason,
                       "after the last attempt there is 2 non-finite values at forward"))
      << decisions.agreed()[1].reason;
  EXPECT_TRUE(events_named(temp / "run", "attempt_skipped").empty());
}

// The others would wait for it in the collectives that follow.
TEST(StepGuardCreate, RanksWhosePoliciesDifferInTheSideChannelStillMeet) {
  ThreadGroup(2).run([](Collective& collective) {
    GuardOptions options;
    options.policy = collective.rank() == 0 ? "side_channel: false" : "side_channel: true";
    std::unique_ptr<StepGuard> guard;
    const Status status = StepGuard::create(collective, options, &guard);
    ASSERT_TRUE(status.ok()) << status.to_string();
    EXPECT_EQ(attempt(*guard, [] {}).exit_code(), 83);
  });
}

}  // namespace
}  // namespace holdfast
