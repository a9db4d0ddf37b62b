// A job that is started again: every rank goes on where rank 0's memory says.
#include <unistd.h>

#include "coord/events.h"
#include "holdfast/coord/state.h"
#include "holdfast/coord/state.pb.h"
#include "ranks/guarded_ranks.h"

namespace holdfast {
namespace {

constexpr int kRanks = 3;

GuardOptions resuming(const std::string& run_dir, const std::string& policy = kSkipAnything) {
  GuardOptions options = guard_options(policy, run_dir);
  options.resume = true;
  return options;
}

Decision bad_attempt(StepGuard& guard, int rank, float value = kNanF) {
  return attempt(guard, [&] { observe_values(guard, Stage::kBackward, "w", {rank == 1 ? value : 1.0f}); });
}

TEST(StepGuardResume, EveryRankIsWhereTheRunWas) {
  const TempDir temp;
  run_guarded(kRanks, resuming(temp / "run"), [&](StepGuard& guard, int rank) {
    EXPECT_EQ(guard.epoch(), 1u);
    EXPECT_EQ(guard.attempt(), 0u);
    for (int i = 0; i < 4; ++i) EXPECT_TRUE(attempt(guard, [] {}).apply());
    EXPECT_EQ(bad_attempt(guard, rank).action, Action::kSkip);
    EXPECT_EQ(bad_attempt(guard, rank).action, Action::kSkip);
  });
  run_guarded(kRanks, resuming(temp / "run"), [&](StepGuard& guard, int rank) {
    EXPECT_EQ(guard.epoch(), 2u) << rank;
    EXPECT_EQ(guard.attempt(), 6u) << rank;
    EXPECT_EQ(guard.updates(), 4u) << rank;
    EXPECT_EQ(guard.skips(), 2u) << rank;
    EXPECT_EQ(bad_attempt(guard, rank).action, Action::kSkip);
    EXPECT_TRUE(guard.close().apply());
  });
  const Json event = events_named(temp / "run", "attempt_skipped").back();
  EXPECT_EQ(event["epoch"], 2);
  EXPECT_EQ(event["attempt"], 6);
  EXPECT_EQ(event["total"], 3);
  EXPECT_EQ(event["consecutive"], 3);
}

// Field case 21, as far as it goes without a checkpoint; killed right after the overflow, or later.
TEST(StepGuardResume, TheLossScalerGoesOnTheSame) {
  const std::string policy = std::string(kSkipAnything) +
                             " state_interval_attempts: 1 loss_scale { initial: 512 growth_interval: 100 }";
  for (const int clean : {0, 37}) {
    const TempDir temp;
    GuardOptions options = resuming(temp / "run", policy);
    options.loss_scaling = true;
    LossScaler::State saved;
    run_guarded(kRanks, options, [&](StepGuard& guard, int rank) {
      EXPECT_EQ(bad_attempt(guard, rank, kInfF).action, Action::kSkip);
      for (int i = 0; i < clean; ++i) attempt(guard, [] {});
      if (rank == 0) saved = guard.loss_scale_state();
    });
    EXPECT_EQ(saved.scale, 256.0);
    EXPECT_EQ(saved.clean_updates, static_cast<std::uint64_t>(clean));
    run_guarded(kRanks, options, [&](StepGuard& guard, int rank) {
      EXPECT_EQ(guard.loss_scale_state(), saved) << rank;
      for (int i = clean; i < 99; ++i) attempt(guard, [] {});
      EXPECT_EQ(guard.loss_scale(), 256.0);
      attempt(guard, [] {});
      EXPECT_EQ(guard.loss_scale(), 512.0);
    });
  }
}

// The policy is read anew at each start; what it no longer allows is brought to the nearest that it does.
TEST(StepGuardResume, ALossScaleMeetsATighterPolicy) {
  const TempDir temp;
  GuardOptions options = resuming(temp / "run", std::string(kSkipAnything) + " loss_scale { hysteresis: 2 }");
  options.loss_scaling = true;
  run_guarded(kRanks, options, [](StepGuard& guard, int) { EXPECT_TRUE(attempt(guard, [] {}).apply()); });
  options.policy =
      std::string(kSkipAnything) + " loss_scale { initial: 1024 largest: 1024 growth_interval: 1 }";
  run_guarded(kRanks, options, [](StepGuard& guard, int) {
    EXPECT_EQ(guard.loss_scale_state(), (LossScaler::State{1024, 0, 1}));
  });
}

// The attempt is made again, with the scale it was made with.
TEST(StepGuardResume, AnAbortLeavesTheLossScaleAsItWas) {
  const TempDir temp;
  GuardOptions options = resuming(temp / "run", "on_first: ABORT state_interval_attempts: 1");
  options.loss_scaling = true;
  run_guarded(kRanks, options, [&](StepGuard& guard, int rank) {
    EXPECT_TRUE(attempt(guard, [] {}).apply());
    EXPECT_EQ(bad_attempt(guard, rank).exit_code(), 81);  // NaN and no infinity
  });
  RunState state;
  ASSERT_TRUE(read_state(temp / "run", &state).ok());
  EXPECT_EQ(state.loss_scale().scale(), 65536);
}

TEST(StepGuardResume, AnAbortThatNobodyAnsweredForIsRefusedOnEveryRank) {
  const TempDir temp;
  const std::string policy = "on_first: ABORT";
  run_guarded(kRanks, resuming(temp / "run", policy),
              [&](StepGuard& guard, int rank) { EXPECT_EQ(bad_attempt(guard, rank).exit_code(), 81); });
  ThreadGroup(kRanks).run([&](Collective& collective) {
    std::unique_ptr<StepGuard> guard;
    const Status status = StepGuard::create(collective, resuming(temp / "run", policy), &guard);
    EXPECT_EQ(status.code(), StatusCode::kRestartNotAcknowledged) << collective.rank();
    EXPECT_NE(status.message().find("holdfast ack"), std::string::npos);
    EXPECT_EQ(guard, nullptr);
  });
}

// Rank 0 notices in a clean attempt, when it writes, and all ranks leave in the next; or its thread that
// looks each second was quicker.
TEST(StepGuardResume, ARunWhoseFolderWasTakenLeavesOnEveryRank) {
  const TempDir temp;
  const std::string policy = std::string(kSkipAnything) + " state_interval_attempts: 1";
  testing::internal::CaptureStderr();
  run_guarded(kRanks, resuming(temp / "run", policy), [&](StepGuard& guard, int rank) {
    EXPECT_TRUE(attempt(guard, [] {}).apply());
    if (rank == 0) {
      ASSERT_EQ(unlink((temp / "run/lock").c_str()), 0);
      run_guarded(1, resuming(temp / "run", policy),
                  [](StepGuard& other, int) { EXPECT_EQ(other.epoch(), 2u); });
    }
    Decision decision = attempt(guard, [] {});
    if (decision.apply()) decision = attempt(guard, [] {});
    EXPECT_EQ(decision.exit_code(), 83);
    EXPECT_NE(decision.reason.find("taken over"), std::string::npos);
  });
  testing::internal::GetCapturedStderr();
}

TEST(StepGuardResume, ARunWhoseFolderWasTakenDoesNotEndAsIfAllWereWell) {
  const TempDir temp;
  testing::internal::CaptureStderr();
  run_guarded(kRanks, resuming(temp / "run"), [&](StepGuard& guard, int rank) {
    EXPECT_TRUE(attempt(guard, [] {}).apply());
    if (rank == 0) {
      ASSERT_EQ(unlink((temp / "run/lock").c_str()), 0);
      run_guarded(1, resuming(temp / "run"), [](StepGuard&, int) {});
    }
    EXPECT_EQ(guard.close().exit_code(), 83);
  });
  testing::internal::GetCapturedStderr();
}

}  // namespace
}  // namespace holdfast
