#include "holdfast/coord/calibration.h"

#include <gtest/gtest.h>

#include <limits>
#include <memory>

#include "coord/events.h"
#include "coord/sample_incident.h"
#include "holdfast/coord/budget.h"
#include "holdfast/coord/coordinator.h"
#include "holdfast/coord/decide.h"
#include "holdfast/coord/policy.h"
#include "holdfast/coord/policy.pb.h"

namespace holdfast {
namespace {

constexpr BadCounts kOneNan = {1, 0, 0};
constexpr BadCounts kOneInf = {0, 1, 0};
constexpr BadCounts kOneNegInf = {0, 0, 1};

TEST(Calibration, AStreakIsPendingUntilAnUpdateSettlesIt) {
  Calibration calibration;
  for (std::uint64_t attempt = 0; attempt < 3; ++attempt) calibration.count_overflow(attempt);
  EXPECT_EQ(calibration.pending(), 3u);
  EXPECT_EQ(calibration.total(), 0u);
  EXPECT_EQ(calibration.settle_by_update().calibration, 3u);
  EXPECT_EQ(calibration.pending(), 0u);
  EXPECT_EQ(calibration.total(), 3u);
  EXPECT_EQ(calibration.settle_by_update().calibration, 0u);
  EXPECT_EQ(calibration.total(), 3u);
}

TEST(Calibration, OfAMixedStreakAnUpdateChargesTheDefectsAlone) {
  Calibration calibration;
  calibration.count_overflow(0);
  calibration.count_defect();
  calibration.count_defect();
  calibration.count_overflow(3);
  calibration.count_overflow(4);
  EXPECT_EQ(calibration.pending(), 5u);
  EXPECT_EQ(calibration.pending_defects(), 2u);
  const Calibration::Settled settled = calibration.settle_by_update();
  EXPECT_EQ(settled.calibration, 3u);
  EXPECT_EQ(settled.charged, 2u);
  EXPECT_EQ(calibration.pending(), 0u);
  EXPECT_EQ(calibration.pending_defects(), 0u);
  EXPECT_EQ(calibration.total(), 3u);
  EXPECT_EQ(calibration.in_window(4, 100), 3u);  // what is charged is no calibration
}

TEST(Calibration, AMixedStreakIsChargedWholeWhenNoUpdateEndsIt) {
  Calibration calibration;
  calibration.count_overflow(0);
  calibration.settle_by_update();
  calibration.count_overflow(2);
  calibration.count_defect();
  calibration.count_defect();
  EXPECT_EQ(calibration.settle_as_charged(), 3u);
  EXPECT_EQ(calibration.pending(), 0u);
  EXPECT_EQ(calibration.total(), 1u);
  EXPECT_EQ(calibration.in_window(4, 100), 1u);
}

TEST(Calibration, ACountedStreakThatIsChargedIsNoCalibration) {
  Calibration calibration;
  calibration.count_overflow(4);
  EXPECT_EQ(calibration.settle_by_update().charged, 0u);
  calibration.count_overflow(5);
  calibration.count_overflow(6);
  EXPECT_EQ(calibration.in_window(6, 100), 3u);
  EXPECT_EQ(calibration.settle_as_charged(), 2u);
  EXPECT_EQ(calibration.total(), 1u);
  EXPECT_EQ(calibration.pending(), 0u);
  EXPECT_EQ(calibration.in_window(6, 100), 1u);
  EXPECT_EQ(calibration.settle_as_charged(), 0u);
  EXPECT_EQ(calibration.in_window(6, 100), 1u);
}

TEST(Calibration, TheWindowHoldsTheLastAttemptsAndNoOthers) {
  Calibration calibration;
  for (const std::uint64_t attempt : {10u, 11u, 15u}) calibration.count_overflow(attempt);
  EXPECT_EQ(calibration.in_window(15, 6), 3u);  // 10 to 15
  EXPECT_EQ(calibration.in_window(16, 6), 2u);  // 11 to 16
  EXPECT_EQ(calibration.in_window(20, 6), 1u);
  EXPECT_EQ(calibration.in_window(21, 6), 0u);
}

TEST(Calibration, AStreakLongerThanTheWindowIsChargedWhole) {
  Calibration calibration;
  for (std::uint64_t attempt = 0; attempt < 20; ++attempt) {
    calibration.count_overflow(attempt);
    calibration.in_window(attempt, 4);
  }
  EXPECT_EQ(calibration.in_window(19, 4), 4u);
  EXPECT_EQ(calibration.settle_as_charged(), 20u);
  EXPECT_EQ(calibration.in_window(19, 4), 0u);
}

TEST(Calibration, AWindowAsWideAsCanBeHoldsEveryAttempt) {
  Calibration calibration;
  for (std::uint64_t attempt = 1; attempt <= 3; ++attempt) calibration.count_overflow(attempt);
  EXPECT_EQ(calibration.in_window(3, std::numeric_limits<std::uint64_t>::max()), 3u);
}

Policy policy_of(const std::string& text) {
  Policy policy;
  EXPECT_TRUE(parse_policy(text, &policy).ok());
  return policy;
}

// Four ranks at loss scale 1024, rank 2 having seen `counts` at `stage`.
Incident scaled_incident(std::uint64_t attempt, Stage stage, BadCounts counts, bool exhausted = false) {
  Incident incident = sample_incident(4, [&](Record& sum) {
    sum.add_bad(stage, counts);
    sum.mark_bad(2);
  });
  incident.attempt = attempt;
  incident.views = {sample_view(2, {{stage, "w", 3, counts, 0}})};
  incident.loss_scale = LossScaleView{1024.0, exhausted};
  return incident;
}

TEST(IsCalibration, OnlyAnInfinityInTheGradientsAtAScaleThatCanBeHalved) {
  const Policy policy = policy_of("");
  for (int s = 0; s < kStageCount; ++s) {
    const Stage stage = static_cast<Stage>(s);
    const bool gradients = stage == Stage::kBackward || stage == Stage::kReduction;
    EXPECT_EQ(is_calibration(policy, scaled_incident(1, stage, kOneInf)), gradients) << s;
    EXPECT_EQ(is_calibration(policy, scaled_incident(1, stage, kOneNegInf)), gradients) << s;
    EXPECT_EQ(is_calibration(policy, scaled_incident(1, stage, {5, 1, 0})), gradients) << s;
    EXPECT_FALSE(is_calibration(policy, scaled_incident(1, stage, kOneNan))) << s;
    EXPECT_FALSE(is_calibration(policy, scaled_incident(1, stage, kOneInf, true))) << s;
    Incident unscaled = scaled_incident(1, stage, kOneInf);
    unscaled.loss_scale.reset();
    EXPECT_FALSE(is_calibration(policy, unscaled)) << s;
  }
}

TEST(IsPending, NanAloneStaysPendingTooWhileTheScaleCanBeHalved) {
  for (int s = 0; s < kStageCount; ++s) {
    const Stage stage = static_cast<Stage>(s);
    const bool gradients = stage == Stage::kBackward || stage == Stage::kReduction;
    for (const BadCounts counts : {kOneNan, kOneInf, kOneNegInf}) {
      EXPECT_EQ(is_pending(scaled_incident(1, stage, counts)), gradients) << s;
      EXPECT_FALSE(is_pending(scaled_incident(1, stage, counts, true))) << s;
      Incident unscaled = scaled_incident(1, stage, counts);
      unscaled.loss_scale.reset();
      EXPECT_FALSE(is_pending(unscaled)) << s;
    }
  }
}

TEST(IsCalibration, NanAloneCountsWhenThePolicySaysSo) {
  const Policy policy = policy_of("loss_scale { nan_is_calibration: true }");
  EXPECT_TRUE(is_calibration(policy, scaled_incident(1, Stage::kBackward, kOneNan)));
  EXPECT_TRUE(is_calibration(policy, scaled_incident(1, Stage::kReduction, kOneNan)));
  EXPECT_FALSE(is_calibration(policy, scaled_incident(1, Stage::kLoss, kOneNan)));
  EXPECT_FALSE(is_calibration(policy, scaled_incident(1, Stage::kBackward, kOneNan, true)));
}

TEST(IsCalibration, AnOverflowAfterANonFiniteLossIsADefect) {
  Incident incident = sample_incident(4, [&](Record& sum) {
    sum.add_bad(Stage::kLoss, kOneInf);
    sum.add_bad(Stage::kBackward, kOneInf);
    sum.mark_bad(2);
  });
  incident.loss_scale = LossScaleView{1024.0, false};
  EXPECT_FALSE(is_calibration(policy_of("loss_scale { nan_is_calibration: true }"), incident));
}

// A run folder, and rank 0 with its attempts.
struct Rank0 {
  explicit Rank0(const std::string& text) {
    EXPECT_TRUE(Coordinator::create(policy_of(text), run_dir, &coordinator).ok());
  }
  Decision overflow() { return handle(scaled_incident(attempt, Stage::kBackward, kOneInf)); }
  Decision nan() { return handle(scaled_incident(attempt, Stage::kBackward, kOneNan)); }
  Decision defect() { return handle(scaled_incident(attempt, Stage::kForward, kOneNan)); }
  Decision handle(const Incident& incident) {
    ++attempt;
    return coordinator->handle(incident);
  }
  void update() { coordinator->update_applied(1, attempt++, 5); }
  std::vector<Json> named(const std::string& name) const { return events_named(run_dir, name); }

  const TempDir temp;
  const std::string run_dir = temp / "run";
  std::unique_ptr<Coordinator> coordinator;
  std::uint64_t attempt = 0;
};

TEST(CoordinatorCalibration, AStreakThatEndsInAnUpdateIsNotInTheBudget) {
  Rank0 rank0("max_total_skips: 0 on_first: ABORT");
  for (int i = 0; i < 15; ++i) EXPECT_EQ(rank0.overflow().action, Action::kSkip) << i;
  rank0.update();
  const std::vector<Json> skipped = rank0.named("attempt_skipped");
  ASSERT_EQ(skipped.size(), 15u);
  for (std::size_t i = 0; i < skipped.size(); ++i) {
    EXPECT_EQ(skipped[i]["pending"], i + 1);
    EXPECT_EQ(skipped[i]["total"], 0);
    EXPECT_EQ(skipped[i]["consecutive"], 0);
    EXPECT_EQ(skipped[i]["loss_scale"], 1024.0);
  }
  ASSERT_EQ(rank0.named("calibrated").size(), 1u);
  EXPECT_EQ(rank0.named("calibrated")[0]["skips"], 15);
  EXPECT_TRUE(rank0.named("calibration_charged").empty());
}

TEST(CoordinatorCalibration, AStreakThatEndsInADefectIsChargedWholeBeforeTheDefectIsDecidedOn) {
  Rank0 rank0("max_consecutive_skips: 4");
  for (int i = 0; i < 3; ++i) rank0.overflow();
  EXPECT_EQ(rank0.defect().action, Action::kSkip);
  ASSERT_EQ(rank0.named("calibration_charged").size(), 1u);
  EXPECT_EQ(rank0.named("calibration_charged")[0]["skips"], 3);
  EXPECT_EQ(rank0.named("attempt_skipped").back()["total"], 4);
  EXPECT_EQ(rank0.named("attempt_skipped").back()["consecutive"], 4);
  EXPECT_EQ(rank0.named("attempt_skipped").back()["pending"], 0);
  EXPECT_EQ(rank0.defect().exit_code(), 81);
}

TEST(CoordinatorCalibration, AStreakThatIsChargedCanItselfSpendTheBudget) {
  Rank0 rank0("max_consecutive_skips: 3");
  for (int i = 0; i < 3; ++i) EXPECT_EQ(rank0.overflow().action, Action::kSkip);
  EXPECT_EQ(rank0.defect().exit_code(), 81);
}

TEST(CoordinatorCalibration, AnUpdateSettlesOnlyWhatIsPending) {
  Rank0 rank0("");
  rank0.overflow();
  rank0.update();
  rank0.update();
  rank0.overflow();
  rank0.overflow();
  rank0.defect();
  rank0.update();
  ASSERT_EQ(rank0.named("calibrated").size(), 1u);
  EXPECT_EQ(rank0.named("calibration_charged").at(0)["skips"], 2);
  rank0.coordinator->run_finished(1, rank0.attempt, 3);
  EXPECT_EQ(rank0.named("run_finished").at(0)["skips"], 3);
  EXPECT_EQ(rank0.named("run_finished").at(0)["calibration_skips"], 1);
}

TEST(CoordinatorCalibration, OfAStreakThatEndsInAnUpdateTheNanAloneIsCharged) {
  Rank0 rank0("max_consecutive_skips: 2");
  rank0.overflow();
  for (int i = 0; i < 4; ++i)
    EXPECT_EQ(rank0.nan().action, Action::kSkip) << i;  // the row is not counted yet
  rank0.overflow();
  EXPECT_EQ(rank0.named("attempt_skipped").back()["pending"], 6);
  EXPECT_EQ(rank0.named("attempt_skipped").back()["total"], 0);
  rank0.update();
  EXPECT_EQ(rank0.named("calibrated").at(0)["skips"], 2);
  EXPECT_EQ(rank0.named("calibration_charged").at(0)["skips"], 4);
  EXPECT_EQ(rank0.named("calibration_charged").at(0)["total"], 4);
  // The update has ended the row, and nothing is charged twice.
  for (int i = 0; i < 2; ++i) EXPECT_EQ(rank0.defect().action, Action::kSkip) << i;
  EXPECT_EQ(rank0.named("attempt_skipped").back()["total"], 6);
  EXPECT_EQ(rank0.named("attempt_skipped").back()["consecutive"], 2);
  EXPECT_EQ(rank0.named("calibrated").size() + rank0.named("calibration_charged").size(), 2u);
}

TEST(CoordinatorCalibration, ANanEveryFewAttemptsChargesTheBudgetExactly) {
  Rank0 rank0("max_total_skips: 5");
  for (std::uint64_t i = 1; i <= 5; ++i) {
    EXPECT_EQ(rank0.nan().action, Action::kSkip) << i;
    for (int k = 0; k < 9; ++k) rank0.update();
    EXPECT_EQ(rank0.named("calibration_charged").size(), i);
    EXPECT_EQ(rank0.named("calibration_charged").back()["total"], i);
  }
  EXPECT_TRUE(rank0.named("calibrated").empty());
  EXPECT_EQ(rank0.nan().exit_code(), 81);
  EXPECT_EQ(rank0.named("aborted").at(0)["total"], 5);
}

// Decided when it is skipped, not when it is charged: otherwise the run would go on past its total.
TEST(CoordinatorCalibration, TheTotalMustHaveRoomForTheNanThatIsPending) {
  Rank0 rank0("max_total_skips: 3");
  for (int i = 0; i < 3; ++i) EXPECT_EQ(rank0.nan().action, Action::kSkip) << i;
  for (int i = 0; i < 9; ++i) EXPECT_EQ(rank0.overflow().action, Action::kSkip) << i;
  const Decision decision = rank0.nan();
  EXPECT_EQ(decision.exit_code(), 81);
  EXPECT_NE(decision.reason.find("3 of 3 in total"), std::string::npos) << decision.reason;
  EXPECT_EQ(rank0.named("calibration_charged").at(0)["skips"], 12);  // no update: charged whole
  EXPECT_EQ(rank0.named("aborted").at(0)["total"], 12);
  EXPECT_EQ(rank0.named("aborted").at(0)["pending"], 0);
}

TEST(CoordinatorCalibration, NanAloneIsTheFirstThatOnFirstMeansAndOverflowIsNot) {
  Rank0 rank0("on_first: ABORT");
  EXPECT_EQ(rank0.overflow().action, Action::kSkip);
  EXPECT_EQ(rank0.nan().exit_code(), 81);
}

TEST(CoordinatorCalibration, NanThatThePolicyTakesForCalibrationIsNeverCharged) {
  Rank0 rank0("max_total_skips: 0 loss_scale { nan_is_calibration: true }");
  for (int i = 0; i < 3; ++i) EXPECT_EQ(rank0.nan().action, Action::kSkip) << i;
  rank0.update();
  EXPECT_EQ(rank0.named("calibrated").at(0)["skips"], 3);
  EXPECT_TRUE(rank0.named("calibration_charged").empty());
}

TEST(CoordinatorCalibration, NanAloneAtTheFloorExhaustsTheScaleAndTheStreakIsChargedWhole) {
  Rank0 rank0("");
  for (int i = 0; i < 16; ++i) EXPECT_EQ(rank0.nan().action, Action::kSkip) << i;
  EXPECT_EQ(rank0.handle(scaled_incident(rank0.attempt, Stage::kBackward, kOneNan, true)).exit_code(), 82);
  EXPECT_EQ(rank0.named("aborted").at(0)["total"], 16);
}

TEST(CoordinatorCalibration, ADeviceThatIsTheOriginOfNanAgainAndAgainIsASuspectWhileTheStreakIsPending) {
  Rank0 rank0("");
  rank0.coordinator->run_started(
      1, Topology({basic_placement(0), basic_placement(1), basic_placement(2), basic_placement(3)}));
  for (int i = 0; i < 3; ++i) rank0.nan();
  EXPECT_EQ(rank0.named("attempt_skipped").back()["origins"][0]["hardware_suspect"], true);
}

TEST(CoordinatorCalibration, ACalibrationSkipMakesNoDeviceASuspect) {
  Rank0 rank0("suspect_after_incidents: 1");
  rank0.coordinator->run_started(
      1, Topology({basic_placement(0), basic_placement(1), basic_placement(2), basic_placement(3)}));
  for (int i = 0; i < 3; ++i) rank0.overflow();
  EXPECT_EQ(rank0.named("attempt_skipped").back()["origins"][0]["hardware_suspect"], false);
  rank0.defect();
  EXPECT_EQ(rank0.named("attempt_skipped").back()["origins"][0]["hardware_suspect"], true);
}

TEST(CoordinatorCalibration, TooManyInTheWindowRaiseAnAlertOnceThatUpdatesClearOnceAndIsRaisedAgain) {
  Rank0 rank0("loss_scale { window_attempts: 10 max_calibration_skips: 2 }");
  for (std::size_t round = 1; round <= 2; ++round) {
    const std::uint64_t start = rank0.attempt;
    for (int i = 0; i < 2; ++i) rank0.overflow();
    EXPECT_EQ(rank0.named("alert_raised").size(), round - 1);
    for (int i = 0; i < 3; ++i) rank0.overflow();
    ASSERT_EQ(rank0.named("alert_raised").size(), round);
    EXPECT_EQ(rank0.named("alert_raised").back()["rule"], "calibration_rate");
    EXPECT_EQ(rank0.named("alert_raised").back()["skips"], 3);
    EXPECT_EQ(rank0.named("alert_raised").back()["limit"], 2);
    for (int i = 0; i < 30; ++i) rank0.update();
    ASSERT_EQ(rank0.named("alert_cleared").size(), round);
    // The window of the last 10 attempts holds two of the five skips from here on.
    EXPECT_EQ(rank0.named("alert_cleared").back()["attempt"], start + 12);
    EXPECT_EQ(rank0.named("alert_cleared").back()["skips"], 2);
  }
}

}  // namespace
}  // namespace holdfast
