// The guard with a scaled loss, and its warning of one that comes near overflow.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <random>
#include <utility>

#include "coord/events.h"
#include "ranks/guarded_ranks.h"

namespace holdfast {
namespace {

constexpr int kRanks = 4;

GuardOptions scaling(const std::string& policy = "", const std::string& run_dir = "") {
  GuardOptions options = guard_options(policy, run_dir);
  options.loss_scaling = true;
  return options;
}

void see(StepGuard& guard, Stage stage, float value) { observe_values(guard, stage, "w", {1.0f, value}); }

// An attempt in which `rank` alone sees `value` at `stage`.
Decision attempt_with(StepGuard& guard, bool mine, Stage stage, float value) {
  return attempt(guard, [&] { see(guard, stage, mine ? value : 1.0f); });
}
Decision clean(StepGuard& guard) {
  return attempt(guard, [&] { see(guard, Stage::kBackward, 1.0f); });
}

// What each rank's scale was before each attempt and after the last.
using Scales = std::array<std::vector<double>, kRanks>;

void expect_the_same_on_every_rank(const Scales& scales) {
  for (const auto& of_rank : scales) EXPECT_EQ(of_rank, scales[0]);
}

// Field case 20.
void expect_sixteen_halvings_then_exhausted(const std::string& policy, float value) {
  const TempDir temp;
  Decisions decisions(kRanks);
  Scales scales;
  run_guarded(kRanks, scaling(policy, temp / "run"), [&](StepGuard& guard, int rank) {
    auto& mine = scales[static_cast<std::size_t>(rank)];
    for (int i = 0; i < 40; ++i) {
      mine.push_back(guard.loss_scale());
      const Decision decision = attempt_with(guard, rank == 2, Stage::kBackward, value);
      decisions.add(rank, decision);
      if (decision.ends_run()) break;
    }
    EXPECT_EQ(guard.loss_scale(), 1.0);
    EXPECT_EQ(guard.updates(), 0u);
  });
  Actions actions(16, "SKIP");
  actions.push_back("ABORT 82");
  EXPECT_EQ(decisions.agreed_actions(), actions);
  EXPECT_TRUE(decisions.agreed().back().reason.starts_with("loss scale exhausted"))
      << decisions.agreed().back().reason;
  std::vector<double> expected;
  for (int exponent = 16; exponent >= 0; --exponent) expected.push_back(std::ldexp(1.0, exponent));
  EXPECT_EQ(scales[0], expected);
  expect_the_same_on_every_rank(scales);
  EXPECT_EQ(events_named(temp / "run", "scale_changed").size(), 16u);
  const std::vector<Json> aborted = events_named(temp / "run", "aborted");
  ASSERT_EQ(aborted.size(), 1u);
  EXPECT_EQ(aborted[0]["exit_code"], 82);
  EXPECT_EQ(aborted[0]["loss_scale"], 1.0);
  EXPECT_EQ(aborted[0]["total"], 16);  // a streak that does not end in an update is charged whole
  EXPECT_TRUE(events_named(temp / "run", "calibrated").empty());
}

TEST(LossScaleExhausted, SixteenHalvingsOfNanAtTheDefaultPolicy) {
  expect_sixteen_halvings_then_exhausted("", kNanF);
}

TEST(LossScaleExhausted, SixteenHalvingsWhenNanIsTakenForCalibration) {
  expect_sixteen_halvings_then_exhausted("loss_scale { nan_is_calibration: true }", kNanF);
}

TEST(LossScaleExhausted, SixteenHalvingsOfInfinitiesAtTheDefaultPolicy) {
  expect_sixteen_halvings_then_exhausted("", kInfF);
}

TEST(LossScaleExhausted, NanForWhichTheTotalHasNoRoomEndsTheRunFirst) {
  Decisions decisions(kRanks);
  run_guarded(kRanks, scaling("max_total_skips: 10"), [&](StepGuard& guard, int rank) {
    for (int i = 0; i < 11; ++i) {
      decisions.add(rank, attempt_with(guard, rank == 2, Stage::kBackward, kNanF));
    }
    EXPECT_EQ(guard.loss_scale(), 64.0);
  });
  Actions actions(10, "SKIP");
  actions.push_back("ABORT 81");
  EXPECT_EQ(decisions.agreed_actions(), actions);
}

// A defect in backward, for which the halved scale is no cure but which comes and goes.
TEST(LossScaling, ANanEvery50AttemptsChargesTheBudgetExactlyAtTheDefaultPolicy) {
  const TempDir temp;
  run_guarded(kRanks, scaling("", temp / "run"), [&](StepGuard& guard, int rank) {
    for (int i = 1; i <= 400; ++i) {
      attempt_with(guard, rank == 2 && i % 50 == 0, Stage::kBackward, kNanF);
      EXPECT_EQ(guard.loss_scale(), std::ldexp(1.0, 16 - i / 50));
    }
    clean(guard);
    EXPECT_TRUE(guard.close().apply());
  });
  EXPECT_EQ(events_named(temp / "run", "run_finished").at(0)["skips"], 8);
  EXPECT_EQ(events_named(temp / "run", "run_finished").at(0)["calibration_skips"], 0);
  EXPECT_EQ(events_named(temp / "run", "calibration_charged").size(), 8u);
}

TEST(LossScaling, WithoutScalingTheScaleIsOneAndAnOverflowIsCharged) {
  const TempDir temp;
  run_guarded(kRanks, guard_options("", temp / "run"), [&](StepGuard& guard, int rank) {
    EXPECT_TRUE(attempt_with(guard, rank == 1, Stage::kBackward, kInfF).action == Action::kSkip);
    EXPECT_EQ(guard.loss_scale(), 1.0);
  });
  EXPECT_EQ(events_named(temp / "run", "attempt_skipped").at(0)["total"], 1);
  EXPECT_TRUE(events_named(temp / "run", "scale_changed").empty());
}

// Of backward on one rank, or born in the sum and found in one rank's share.
TEST(LossScaling, AnOverflowHalvesAndIsPendingUntilAnUpdateMakesItCalibration) {
  for (const Stage stage : {Stage::kBackward, Stage::kReduction}) {
    for (const float value : {kInfF, -kInfF}) {
      const TempDir temp;
      Decisions decisions(kRanks);
      Scales scales;
      run_guarded(kRanks, scaling("max_total_skips: 0", temp / "run"), [&](StepGuard& guard, int rank) {
        auto& mine = scales[static_cast<std::size_t>(rank)];
        for (int i = 0; i < 2; ++i) {
          decisions.add(rank, attempt(guard, [&] {
                          guard.observe_loss(2.5);
                          const std::vector<float> bucket = {1, 1, 1, 1, 1, value, 1, 1};
                          const std::vector<BucketSlice> layout = {{"w", 0, 8}};
                          if (stage == Stage::kReduction) guard.observe_share(TensorView::of(bucket), layout);
                          if (stage == Stage::kBackward && rank == 1) see(guard, stage, value);
                        }));
          mine.push_back(guard.loss_scale());
        }
        decisions.add(rank, clean(guard));
        mine.push_back(guard.loss_scale());
        decisions.add(rank, guard.close());
      });
      EXPECT_EQ(decisions.agreed_actions(), (Actions{"SKIP", "SKIP", "APPLY", "APPLY"}));
      EXPECT_EQ(scales[0], (std::vector<double>{32768.0, 16384.0, 16384.0}));
      expect_the_same_on_every_rank(scales);
      const std::vector<Json> skipped = events_named(temp / "run", "attempt_skipped");
      ASSERT_EQ(skipped.size(), 2u);
      EXPECT_EQ(skipped[1]["stage"], stage_name(stage));
      EXPECT_EQ(skipped[1]["pending"], 2);
      EXPECT_EQ(skipped[1]["total"], 0);
      EXPECT_EQ(skipped[1]["loss_scale"], 32768.0);
      EXPECT_EQ(events_named(temp / "run", "calibrated").at(0)["skips"], 2);
      EXPECT_EQ(events_named(temp / "run", "calibrated").size(), 1u);
      EXPECT_EQ(events_named(temp / "run", "run_finished").at(0)["skips"], 0);
      EXPECT_EQ(events_named(temp / "run", "run_finished").at(0)["calibration_skips"], 2);
      const std::vector<Json> changed = events_named(temp / "run", "scale_changed");
      ASSERT_EQ(changed.size(), 2u);
      EXPECT_EQ(changed[1]["from"], 32768.0);
      EXPECT_EQ(changed[1]["to"], 16384.0);
      EXPECT_EQ(changed[1]["attempt"], 1);
    }
  }
}

TEST(LossScaling, NonFiniteInputForwardLossOrUpdateLeavesTheScaleAndIsCharged) {
  for (const Stage stage : {Stage::kInput, Stage::kForward, Stage::kLoss, Stage::kOptimizer}) {
    for (const float value : {kNanF, kInfF, -kInfF}) {
      const TempDir temp;
      Decisions decisions(kRanks);
      run_guarded(kRanks, scaling("loss_scale { nan_is_calibration: true }", temp / "run"),
                  [&](StepGuard& guard, int rank) {
                    decisions.add(rank, attempt(guard, [&] {
                                    if (rank != 3) return;
                                    see(guard, stage, value);
                                    // The gradients that came of it.
                                    if (stage != Stage::kOptimizer) see(guard, Stage::kBackward, kInfF);
                                  }));
                    EXPECT_EQ(guard.loss_scale(), 65536.0) << stage_name(stage);
                  });
      EXPECT_EQ(decisions.agreed_actions(), Actions{"SKIP"});
      const Json event = events_named(temp / "run", "attempt_skipped").at(0);
      EXPECT_EQ(event["stage"], stage_name(stage));
      EXPECT_EQ(event["total"], 1);
      EXPECT_EQ(event["pending"], 0);
      EXPECT_TRUE(events_named(temp / "run", "scale_changed").empty());
    }
  }
}

TEST(LossScaling, AnInfiniteLossOnAnotherRankMakesAnOverflowADefect) {
  Decisions decisions(kRanks);
  run_guarded(kRanks, scaling("max_total_skips: 0"), [&](StepGuard& guard, int rank) {
    decisions.add(rank, attempt(guard, [&] {
                    guard.observe_loss(rank == 0 ? std::numeric_limits<double>::infinity() : 1.0);
                    see(guard, Stage::kBackward, rank == 3 ? kInfF : 1.0f);
                  }));
    EXPECT_EQ(guard.loss_scale(), 65536.0);
  });
  EXPECT_EQ(decisions.agreed_actions(), Actions{"ABORT 81"});
}

TEST(LossScaling, APendingStreakThatEndsInADefectIsChargedWhole) {
  const TempDir temp;
  Decisions decisions(kRanks);
  run_guarded(kRanks, scaling("", temp / "run"), [&](StepGuard& guard, int rank) {
    for (int i = 0; i < 3; ++i) decisions.add(rank, attempt_with(guard, rank == i, Stage::kBackward, kInfF));
    decisions.add(rank, attempt_with(guard, rank == 1, Stage::kForward, kNanF));
    decisions.add(rank, clean(guard));
    decisions.add(rank, guard.close());
    EXPECT_EQ(guard.loss_scale(), 8192.0);
  });
  EXPECT_EQ(decisions.agreed_actions(), (Actions{"SKIP", "SKIP", "SKIP", "SKIP", "APPLY", "APPLY"}));
  EXPECT_EQ(events_named(temp / "run", "calibration_charged").at(0)["skips"], 3);
  EXPECT_EQ(events_named(temp / "run", "attempt_skipped").at(3)["total"], 4);
  EXPECT_TRUE(events_named(temp / "run", "calibrated").empty());
  EXPECT_EQ(events_named(temp / "run", "run_finished").at(0)["skips"], 4);
  EXPECT_EQ(events_named(temp / "run", "run_finished").at(0)["calibration_skips"], 0);
}

// Section 6: calibration when the streak ends in an applied update, charged whole when it does not.
TEST(LossScaling, AStreakThatTheEndOfTheRunCutsOffIsNotCalibration) {
  const TempDir temp;
  run_guarded(kRanks, scaling("", temp / "run"), [&](StepGuard& guard, int rank) {
    for (int i = 0; i < 2; ++i) attempt_with(guard, rank == 1, Stage::kBackward, kInfF);
    EXPECT_TRUE(guard.close().apply());
    EXPECT_EQ(guard.updates(), 0u);
  });
  EXPECT_TRUE(events_named(temp / "run", "calibrated").empty());
  EXPECT_EQ(events_named(temp / "run", "run_finished").at(0)["skips"], 2);
  EXPECT_EQ(events_named(temp / "run", "run_finished").at(0)["calibration_skips"], 0);
}

// Field case 21, in memory.
TEST(LossScaling, StateSavedAt256With37Of100CleanUpdatesIsRestoredAndGrowsAtTheSameUpdate) {
  const std::string policy = "loss_scale { initial: 256 growth_interval: 100 }";
  LossScaler::State saved;
  run_guarded(kRanks, scaling(policy), [&](StepGuard& guard, int rank) {
    for (int i = 0; i < 37; ++i) clean(guard);
    if (rank == 0) saved = guard.loss_scale_state();
  });
  EXPECT_EQ(saved.scale, 256.0);
  EXPECT_EQ(saved.clean_updates, 37u);
  const std::string other_start = "loss_scale { initial: 65536 growth_interval: 100 }";
  run_guarded(kRanks, scaling(other_start), [&](StepGuard& guard, int) {
    EXPECT_TRUE(guard.restore_loss_scale(saved).ok());
    EXPECT_EQ(guard.loss_scale_state(), saved);
    for (int i = 0; i < 62; ++i) clean(guard);
    EXPECT_EQ(guard.loss_scale(), 256.0);
    clean(guard);
    EXPECT_EQ(guard.loss_scale(), 512.0);
  });
}

TEST(LossScaling, AStateThatThePolicyRulesOutIsRefusedAndWithoutScalingThereIsNothingToRestore) {
  const LossScaler::State too_large = {131072.0, 0, 1};
  run_guarded(1, scaling("loss_scale { largest: 65536 }"), [&](StepGuard& guard, int) {
    EXPECT_EQ(guard.restore_loss_scale(too_large).code(), StatusCode::kUsage);
    EXPECT_EQ(guard.loss_scale(), 65536.0);
  });
  run_guarded(1, guard_options(), [&](StepGuard& guard, int) {
    EXPECT_TRUE(guard.restore_loss_scale(too_large).ok());
    EXPECT_EQ(guard.loss_scale(), 1.0);
  });
}

TEST(LossScaling, TheScaleOfAnAttemptHoldsUntilFinish) {
  run_guarded(kRanks, scaling("loss_scale { growth_interval: 1 }"), [&](StepGuard& guard, int rank) {
    guard.begin();
    see(guard, Stage::kBackward, rank == 0 ? kInfF : 1.0f);
    EXPECT_FALSE(guard.decide().apply());
    EXPECT_EQ(guard.loss_scale(), 65536.0);
    guard.finish();
    EXPECT_EQ(guard.loss_scale(), 32768.0);
    guard.begin();
    EXPECT_TRUE(guard.decide().apply());
    guard.update([&] { EXPECT_EQ(guard.loss_scale(), 32768.0); });
    guard.finish();
    EXPECT_EQ(guard.loss_scale(), 65536.0);
  });
}

enum class Event { kClean, kLocalOverflow, kSumOverflow, kGradientNan, kForward, kLoss, kError };

// Scale, budget and calibration of a run as section 6 has them, without the budget's limits.
struct Reference {
  int exponent = 8;  // 2^-2 to 2^10, halved by two overflows, doubled after four clean updates
  int clean_in_a_row = 0;
  int overflows = 0;
  int pending = 0;
  int pending_nan = 0;
  int calibration = 0;
  int charged = 0;
  bool exhausted = false;

  void add(Event event) {
    const bool overflow = event == Event::kLocalOverflow || event == Event::kSumOverflow;
    const bool gradients = overflow || event == Event::kGradientNan;
    if (gradients && exponent == -2 && overflows == 1) {
      charged += std::exchange(pending, 0) + std::exchange(pending_nan, 0);
      exhausted = true;
      return;
    }
    if (event == Event::kClean) {
      calibration += std::exchange(pending, 0);
      charged += std::exchange(pending_nan, 0);
    }
    if (overflow) ++pending;
    if (event == Event::kGradientNan) ++pending_nan;
    if (!gradients && event != Event::kClean) {
      charged += std::exchange(pending, 0) + std::exchange(pending_nan, 0) + 1;
    }
    if (event == Event::kClean && ++clean_in_a_row == 4) change_scale(exponent < 10 ? 1 : 0);
    if (gradients) {
      clean_in_a_row = 0;
      if (++overflows == 2) change_scale(exponent > -2 ? -1 : 0);
    }
  }
  void change_scale(int doublings) {
    exponent += doublings;
    clean_in_a_row = 0;
    overflows = 0;
  }
};

std::vector<Event> random_events(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::discrete_distribution<int> kind({seed % 2 == 0 ? 60.0 : 8.0, 3, 3, 1, 0.5, 0.5, 0.5});
  std::vector<Event> events;
  for (int i = 0; i < 200; ++i) events.push_back(static_cast<Event>(kind(random)));
  events.push_back(Event::kClean);
  return events;
}

void do_work(StepGuard& guard, Event event, bool mine) {
  const float infinite = mine ? -kInfF : 1.0f;
  const float nan = mine ? kNanF : 1.0f;
  const std::vector<float> sum(7, event == Event::kSumOverflow ? kInfF : 1.0f);
  const std::vector<BucketSlice> layout = {{"w", 0, 7}};
  if (event == Event::kError && mine) guard.report_error(Stage::kForward, "lost");
  see(guard, Stage::kForward, event == Event::kForward ? infinite : 1.0f);
  guard.observe_loss(event == Event::kLoss ? static_cast<double>(nan) : 1.0);
  see(guard, Stage::kBackward, event == Event::kLocalOverflow ? infinite : 1.0f);
  see(guard, Stage::kBackward, event == Event::kGradientNan ? nan : 1.0f);
  guard.observe_share(TensorView::of(sum), layout);
}

TEST(LossScaling, RandomRunsFollowTheReferenceOnEveryRankAndChargeExactlyTheDefects) {
  int exhausted_runs = 0;
  for (std::uint64_t seed = 0; seed < 16; ++seed) {
    const std::vector<Event> events = random_events(seed);
    const std::string policy = std::string(kSkipAnything) +
                               " loss_scale { initial: 256 smallest: 0.25 largest: 1024 growth_interval: 4"
                               " hysteresis: 2 }";
    const TempDir temp;
    Scales scales;
    Decisions decisions(kRanks);
    run_guarded(kRanks, scaling(policy, temp / "run"), [&](StepGuard& guard, int rank) {
      for (std::size_t i = 0; i < events.size(); ++i) {
        scales[static_cast<std::size_t>(rank)].push_back(guard.loss_scale());
        const bool mine = static_cast<int>(i) % kRanks == rank;
        decisions.add(rank, attempt(guard, [&] { do_work(guard, events[i], mine); }));
        if (decisions.of(rank).back().ends_run()) return;
      }
      decisions.add(rank, guard.close());
    });
    Reference reference;
    std::vector<double> expected;
    for (const Event event : events) {
      expected.push_back(std::ldexp(1.0, reference.exponent));
      reference.add(event);
      if (reference.exhausted) break;
    }
    EXPECT_EQ(scales[0], expected) << seed;
    expect_the_same_on_every_rank(scales);
    if (reference.exhausted) {
      ++exhausted_runs;
      EXPECT_EQ(decisions.agreed().back().exit_code(), 82) << seed;
      EXPECT_EQ(events_named(temp / "run", "aborted").at(0)["total"], reference.charged) << seed;
    } else {
      EXPECT_EQ(decisions.agreed().back().exit_code(), 0) << seed;
      const Json finished = events_named(temp / "run", "run_finished").at(0);
      EXPECT_EQ(finished["skips"], reference.charged) << seed;
      EXPECT_EQ(finished["calibration_skips"], reference.calibration) << seed;
    }
  }
  EXPECT_GT(exhausted_runs, 0);
  EXPECT_LT(exhausted_runs, 16);
}

TEST(LossScaling, ASpikeThatIsSkippedLeavesTheScale) {
  run_guarded(kRanks, scaling("spike { action: SKIP }"), [&](StepGuard& guard, int) {
    for (int i = 0; i < 50; ++i) attempt(guard, [&] { guard.watch("norm", 1.0); });
    EXPECT_EQ(attempt(guard, [&] { guard.watch("norm", 9.0); }).action, Action::kSkip);
    EXPECT_EQ(guard.loss_scale(), 65536.0);
    EXPECT_EQ(guard.loss_scale_state().clean_updates, 50u);
  });
}

TEST(HeadroomWarning, RaisedOnceThenAgainAfterTheTensorWasWellBelow) {
  const TempDir temp;
  const double limit = 65504.0 / 4;
  run_guarded(kRanks, guard_options("", temp / "run"), [&](StepGuard& guard, int) {
    for (const double abs_max : {limit, std::nextafter(limit, 1e9), 60000.0, 20000.0,  // raised by the second
                                 limit / 2, limit + 1,                                 // never clear
                                 std::nextafter(limit / 2, 0.0), limit,                // cleared
                                 limit + 2, limit + 3}) {                              // raised again
      attempt(guard, [&] {
        guard.watch_headroom("w", DType::kFloat16, abs_max);
        guard.watch_headroom("v", DType::kBFloat16, abs_max);
      });
    }
  });
  const std::vector<Json> raised = events_named(temp / "run", "headroom_low");
  ASSERT_EQ(raised.size(), 2u);
  EXPECT_EQ(raised[0]["tensor"], "w");
  EXPECT_EQ(raised[0]["attempt"], 1);
  EXPECT_EQ(raised[0]["largest"], 65504.0);
  EXPECT_EQ(raised[1]["attempt"], 8);
  EXPECT_EQ(raised[1]["abs_max"], limit + 2);
}

TEST(HeadroomWarning, EachTensorAndTypeHasItsOwn) {
  const TempDir temp;
  run_guarded(1, guard_options("headroom_warning: 0.5", temp / "run"), [&](StepGuard& guard, int) {
    attempt(guard, [&] {
      guard.watch_headroom("a", DType::kFloat16, 40000.0);
      guard.watch_headroom("b", DType::kBFloat16, 40000.0);
      guard.watch_headroom("c", DType::kBFloat16, 2e38);
      guard.watch_headroom("d", DType::kFloat32, 1.5e38);
      guard.watch_headroom("e", DType::kFloat16, std::numeric_limits<double>::infinity());
    });
  });
  std::vector<std::string> tensors;
  for (const Json& event : events_named(temp / "run", "headroom_low")) tensors.push_back(event["tensor"]);
  EXPECT_EQ(tensors, (std::vector<std::string>{"a", "c", "e"}));
}

}  // namespace
}  // namespace holdfast
