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

TEST(Calibration, AStreakIsPendingUntilItIsSettled) {
  Calibration calibration;
  for (std::uint64_t attempt = 0; attempt < 3; ++attempt) calibration.count_pending(attempt);
  EXPECT_EQ(calibration.pending(), 3u);
  EXPECT_EQ(calibration.total(), 0u);
  EXPECT_EQ(calibration.settle_as_calibration(), 3u);
  EXPECT_EQ(calibration.pending(), 0u);
  EXPECT_EQ(calibration.total(), 3u);
  EXPECT_EQ(calibration.settle_as_calibration(), 0u);
  EXPECT_EQ(calibration.total(), 3u);
}

TEST(Calibration, ACountedStreakThatIsChargedIsNoCalibration) {
  Calibration calibration;
  calibration.count_pending(4);
  calibration.settle_as_calibration();
  calibration.count_pending(5);
  calibration.count_pending(6);
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
  for (const std::uint64_t attempt : {10u, 11u, 15u}) calibration.count_pending(attempt);
  EXPECT_EQ(calibration.in_window(15, 6), 3u);  // 10 to 15
  EXPECT_EQ(calibration.in_window(16, 6), 2u);  // 11 to 16
  EXPECT_EQ(calibration.in_window(20, 6), 1u);
  EXPECT_EQ(calibration.in_window(21, 6), 0u);
}

TEST(Calibration, AStreakLongerThanTheWindowIsChargedWhole) {
  Calibration calibration;
  for (std::uint64_t attempt = 0; attempt < 20; ++attempt) {
    calibration.count_pending(attempt);
    calibration.in_window(attempt, 4);
  }
  EXPECT_EQ(calibration.in_window(19, 4), 4u);
  EXPECT_EQ(calibration.settle_as_charged(), 20u);
  EXPECT_EQ(calibration.in_window(19, 4), 0u);
}

TEST(Calibration, AWindowAsWideAsCanBeHoldsEveryAttempt) {
  Calibration calibration;
  for (std::uint64_t attempt = 1; attempt <= 3; ++attempt) calibration.count_pending(attempt);
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

TEST(CoordinatorCalibration, ACalibrationSkipMakesNoDeviceASuspect) {
  Rank0 rank0("suspect_after_incidents: 1");
  rank0.coordinator->run_started(
      1, Topology({basic_placement(0), basic_placement(1), basic_placement(2), basic_placement(3)}));
  for (int i = 0; i < 3; ++i) rank0.overflow();
  EXPECT_EQ(rank0.named("attempt_skipped").back()["origins"][0]["hardware_suspect"], false);
  rank0.defect();
  EXPECT_EQ(rank0.named("attempt_skipped").back()["origins"][0]["hardware_suspect"], true);
}

TEST(CoordinatorCalibration, TooManyInTheWindowRaiseAnAlertOnceThatIsClearedAndRaisedAgain) {
  Rank0 rank0("loss_scale { window_attempts: 10 max_calibration_skips: 2 }");
  for (int round = 1; round <= 2; ++round) {
    const auto raised = static_cast<std::size_t>(round);
    for (int i = 0; i < 2; ++i) rank0.overflow();
    EXPECT_EQ(rank0.named("alert_raised").size(), raised - 1);
    for (int i = 0; i < 3; ++i) rank0.overflow();
    ASSERT_EQ(rank0.named("alert_raised").size(), raised);
    EXPECT_EQ(rank0.named("alert_raised").back()["rule"], "calibration_rate");
    EXPECT_EQ(rank0.named("alert_raised").back()["skips"], 3);
    EXPECT_EQ(rank0.named("alert_raised").back()["limit"], 2);
    for (int i = 0; i < 10; ++i) rank0.update();
    rank0.overflow();
    EXPECT_EQ(rank0.named("alert_cleared").size(), raised);
    for (int i = 0; i < 10; ++i) rank0.update();
  }
}

}  // namespace
}  // namespace holdfast
