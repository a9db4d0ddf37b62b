// A run is stopped, killed and resumed at random: its budgets, windows and position are those of a run that
// was not.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <random>

#include "coord/events.h"
#include "coord/sample_incident.h"
#include "holdfast/coord/acknowledgement.h"
#include "holdfast/coord/coordinator.h"
#include "holdfast/coord/policy.h"
#include "holdfast/coord/policy.pb.h"
#include "holdfast/coord/state.h"
#include "holdfast/coord/state.pb.h"

namespace holdfast {
namespace {

constexpr char kManySkips[] = "max_total_skips: 100000 max_consecutive_skips: 100000 ";

Policy policy_of(const std::string& text) {
  Policy policy;
  EXPECT_TRUE(parse_policy(text, &policy).ok());
  return policy;
}

Topology one_rank() { return Topology({basic_placement(0)}); }

// Plain arithmetic over the whole list of attempts.
struct Reference {
  std::uint64_t attempt = 0;
  std::uint64_t update = 0;
  std::uint64_t total = 0;
  std::uint64_t consecutive = 0;
  std::vector<bool> skipped;  // of each attempt that was made
  bool raised = false;

  std::uint64_t in_window(std::uint64_t width) const {
    const auto held = static_cast<std::ptrdiff_t>(std::min<std::uint64_t>(width, skipped.size()));
    return static_cast<std::uint64_t>(std::count(skipped.end() - held, skipped.end(), true));
  }
  // Rule: 12 attempts, 3 skips, at least 5 attempts.
  void watch() {
    const std::uint64_t skips = in_window(12);
    if (!raised && skips > 3 && skipped.size() >= 5) {
      raised = true;
    } else if (raised && skips <= 1) {
      raised = false;
    }
  }
  void clean() {
    ++attempt;
    ++update;
    consecutive = 0;
    skipped.push_back(false);
    watch();
  }
  void skip() {
    ++attempt;
    ++total;
    ++consecutive;
    skipped.push_back(true);
    watch();
  }
};

// The process of rank 0, which can end and come back.
class Restartable {
 public:
  Restartable(const std::string& run_dir, const std::string& policy_text)
      : run_dir_(run_dir), policy_(policy_of(policy_text)) {}

  Status start() {
    EXPECT_EQ(rank0_, nullptr);
    if (Status s = Coordinator::resume(policy_, run_dir_, &rank0_); !s.ok()) return s;
    rank0_->run_started(memory().epoch(), one_rank());
    return Status();
  }
  void kill() { rank0_.reset(); }  // nothing is written on the way out
  void finish() {
    rank0_->run_finished(memory().epoch(), memory().attempt(), memory().update());
    rank0_.reset();
  }
  void clean() { rank0_->update_applied(memory().epoch(), memory().attempt(), memory().update()); }
  Decision bad() {
    Incident incident = one_nan(2);
    incident.epoch = memory().epoch();
    incident.attempt = memory().attempt();
    incident.update = memory().update();
    return rank0_->handle(incident);
  }
  const RunState& memory() const { return rank0_->memory(); }
  Coordinator& rank0() { return *rank0_; }

  // What is on disk.
  RunState saved() const {
    RunState state;
    const Status status = read_state(run_dir_, &state);
    EXPECT_TRUE(status.ok()) << status.to_string();
    return state;
  }

 private:
  const std::string run_dir_;
  const Policy policy_;
  std::unique_ptr<Coordinator> rank0_;
};

void expect_equal(const RunState& state, const Reference& reference) {
  ASSERT_EQ(state.attempt(), reference.attempt);
  ASSERT_EQ(state.update(), reference.update);
  ASSERT_EQ(state.total_skips(), reference.total);
  ASSERT_EQ(state.consecutive_skips(), reference.consecutive);
  ASSERT_EQ(state.attempts_made(), reference.skipped.size());
  ASSERT_EQ(state.raised_alerts_size(), reference.raised ? 1 : 0);
  std::vector<std::uint64_t> skips;
  for (std::size_t i = 0; i < reference.skipped.size(); ++i) {
    if (reference.skipped[i]) skips.push_back(i + 1);
  }
  ASSERT_EQ(static_cast<std::size_t>(state.recent_skips_size()), skips.size());
  for (int i = 0; i < state.recent_skips_size(); ++i) {
    ASSERT_EQ(state.recent_skips(i).attempt(), skips[static_cast<std::size_t>(i)]);
  }
}

void run_at_random(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const TempDir temp;
  const std::uint64_t interval = 1 + random() % 6;
  Restartable run(temp / "run", kManySkips + std::string("rate_rules { name: 'r' window_attempts: 12 ") +
                                    "max_skips: 3 least_attempts: 5 } state_interval_attempts: " +
                                    std::to_string(interval));
  Reference now;
  Reference written;  // what a kill goes back to
  std::uint64_t unwritten = 0;
  const double bad_rate = std::uniform_real_distribution<double>(0.05, 0.5)(random);
  ASSERT_TRUE(run.start().ok());
  std::uint64_t epoch = 1;
  for (int step = 0; step < 80; ++step) {
    if (random() % 10 == 0) {
      const bool orderly = random() % 2 == 0;
      orderly ? run.finish() : run.kill();
      if (!orderly) now = written;
      ASSERT_TRUE(run.start().ok());
      ASSERT_EQ(run.memory().epoch(), ++epoch);
      ASSERT_EQ(run.memory().first_attempt(), now.attempt);
      written = now;
      unwritten = 0;
    } else if (std::bernoulli_distribution(bad_rate)(random)) {
      ASSERT_EQ(run.bad().action, Action::kSkip);
      now.skip();
      written = now;
      unwritten = 0;
    } else {
      const bool row_ends = now.consecutive > 0;
      const bool raised = now.raised;
      run.clean();
      now.clean();
      // A skip is never lost, nor an alert, nor the end of a row of skips; of clean attempts fewer than the
      // interval.
      if (++unwritten >= interval || row_ends || raised != now.raised) {
        written = now;
        unwritten = 0;
      }
    }
    expect_equal(run.saved(), written);
    if (testing::Test::HasFatalFailure()) return;
  }
  // Each alert was told once.
  std::uint64_t raised = 0;
  for (const Json& event : read_events(temp / "run")) {
    if (event["event"] == "alert_raised") {
      ASSERT_EQ(++raised, 1u);
    } else if (event["event"] == "alert_cleared") {
      ASSERT_EQ(--raised, 0u);
    }
  }
  EXPECT_EQ(raised, now.raised ? 1u : 0u);
}

TEST(RunMemory, BudgetsAndWindowsAreThoseOfARunThatWasNotInterrupted) {
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    SCOPED_TRACE(seed);
    run_at_random(seed);
    if (HasFatalFailure()) return;
  }
}

TEST(RunMemory, WithoutResumeTheFolderIsRefused) {
  const TempDir temp;
  Restartable run(temp / "run", "");
  ASSERT_TRUE(run.start().ok());
  run.kill();
  std::unique_ptr<Coordinator> fresh;
  const Status status = Coordinator::create(policy_of(""), temp / "run", &fresh);
  EXPECT_EQ(status.code(), StatusCode::kUsage);
  EXPECT_NE(status.message().find("--resume"), std::string::npos) << status.message();
}

TEST(RunMemory, ATotalBudgetLastsForTheWholeRun) {
  const TempDir temp;
  Restartable run(temp / "run", "max_total_skips: 3");
  for (int epoch = 0; epoch < 3; ++epoch) {
    ASSERT_TRUE(run.start().ok());
    EXPECT_EQ(run.bad().action, Action::kSkip);
    run.clean();
    run.kill();
  }
  ASSERT_TRUE(run.start().ok());
  EXPECT_EQ(run.bad().exit_code(), 81);
}

TEST(RunMemory, AnAttemptThatEndedTheRunIsMadeAgain) {
  const TempDir temp;
  Restartable run(temp / "run", "on_error: ABORT");
  ASSERT_TRUE(run.start().ok());
  run.clean();
  run.clean();
  Incident incident = exception_on(1, "boom");
  incident.attempt = 2;
  incident.update = 2;
  EXPECT_EQ(run.rank0().handle(incident).exit_code(), 80);
  run.kill();
  ASSERT_TRUE(run.start().ok()) << "an exception needs no acknowledgement";
  EXPECT_EQ(run.memory().attempt(), 2u);
  EXPECT_EQ(run.memory().update(), 2u);
  const Json started = events_named(temp / "run", "run_started").back();
  EXPECT_EQ(started["epoch"], 2);
  EXPECT_EQ(started["attempt"], 2);
  EXPECT_EQ(started["resumed_from"]["epoch"], 1);
  EXPECT_EQ(started["resumed_from"]["exit_code"], 80);
}

TEST(RunMemory, AKilledEpochIsRememberedAsSuch) {
  const TempDir temp;
  Restartable run(temp / "run", "");
  ASSERT_TRUE(run.start().ok());
  run.kill();
  ASSERT_TRUE(run.start().ok());
  ASSERT_EQ(run.saved().endings_size(), 1);
  EXPECT_FALSE(run.saved().endings(0).has_exit_code());
  EXPECT_EQ(events_named(temp / "run", "run_started").back()["resumed_from"]["exit_code"], nullptr);
}

TEST(RunMemory, LossScaleCalibrationAndSuspectsComeBack) {
  const TempDir temp;
  Restartable run(temp / "run", kManySkips);
  Incident overflow = sample_incident(4, [](Record& sum) {
    sum.add_bad(Stage::kBackward, {0, 1, 0});
    sum.mark_bad(1);
  });
  overflow.loss_scale = LossScaleView{512.0, false};
  ASSERT_TRUE(run.start().ok());
  for (int i = 0; i < 3; ++i) EXPECT_EQ(run.bad().action, Action::kSkip);
  run.rank0().keep_loss_scale(256.0, 37, 2);
  EXPECT_EQ(run.rank0().handle(overflow).action, Action::kSkip);
  run.kill();
  ASSERT_TRUE(run.start().ok());
  EXPECT_EQ(run.memory().loss_scale().scale(), 256.0);
  EXPECT_EQ(run.memory().loss_scale().clean_updates(), 37u);
  EXPECT_EQ(run.memory().loss_scale().overflows_to_halve(), 2u);
  EXPECT_EQ(run.memory().skips(), 4u);
  // The pending overflow is charged when a defect follows it, across the restart too.
  EXPECT_EQ(run.bad().action, Action::kSkip);
  EXPECT_EQ(run.saved().total_skips(), 5u);
  ASSERT_EQ(events_named(temp / "run", "calibration_charged").size(), 1u);
  ASSERT_EQ(run.saved().recent_skips_size(), 5);
  EXPECT_EQ(run.saved().recent_skips(3).attempt(), 4u);  // where it was
}

TEST(RunMemory, ACleanAttemptWritesOnlyAtItsInterval) {
  const TempDir temp;
  Restartable run(temp / "run", "state_interval_attempts: 10");
  ASSERT_TRUE(run.start().ok());
  for (int i = 1; i <= 25; ++i) {
    run.clean();
    EXPECT_EQ(run.saved().attempt(), static_cast<std::uint64_t>(i / 10 * 10)) << i;
  }
}

TEST(RunMemory, HalfALineThatACrashLeftDoesNotSpoilTheRecord) {
  const TempDir temp;
  Restartable run(temp / "run", "");
  ASSERT_TRUE(run.start().ok());
  run.kill();
  write_file(temp / "run/events.jsonl", read_file(temp / "run/events.jsonl") + "{\"event\":\"attem");
  ASSERT_TRUE(run.start().ok());
  EXPECT_EQ(read_events(temp / "run").size(), 2u);
}

// Evidence never decides.
TEST(RunMemory, AMemoryThatCannotBeWrittenIsAnEventAndALineAndNothingElse) {
  const TempDir temp;
  Restartable run(temp / "run", "");
  ASSERT_TRUE(run.start().ok());
  ASSERT_EQ(unlink((temp / "run/state").c_str()), 0);
  ASSERT_EQ(mkdir((temp / "run/state").c_str(), 0700), 0);
  testing::internal::CaptureStderr();
  EXPECT_EQ(run.bad().action, Action::kSkip);
  EXPECT_EQ(run.bad().action, Action::kSkip);
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find(temp / "run/state"), std::string::npos) << said;
  EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 1) << said;
  const auto events = events_named(temp / "run", "state_not_written");
  ASSERT_EQ(events.size(), 2u);
  EXPECT_NE(events[0]["reason"].get<std::string>().find("/state"), std::string::npos);
  EXPECT_EQ(events_named(temp / "run", "attempt_skipped").size(), 2u);
}

// An operator takes the folder away from a run that is cut off, by removing its lock.
TEST(RunMemory, ARunThatWasCutOffLeavesTheFolderToTheOneThatTookItOver) {
  const TempDir temp;
  const std::string policy = std::string(kManySkips) + "state_interval_attempts: 2";
  Restartable old_run(temp / "run", policy);
  ASSERT_TRUE(old_run.start().ok());
  EXPECT_EQ(old_run.bad().action, Action::kSkip);
  Restartable new_run(temp / "run", policy);
  EXPECT_EQ(new_run.start().code(), StatusCode::kUsage) << "while its lock is there, it is in use";
  ASSERT_EQ(unlink((temp / "run/lock").c_str()), 0);
  ASSERT_TRUE(new_run.start().ok());
  const std::string record = read_file(temp / "run/events.jsonl");
  const std::string state = read_file(temp / "run/state");

  testing::internal::CaptureStderr();
  for (int i = 0; i < 4; ++i) old_run.clean();
  EXPECT_TRUE(old_run.rank0().taken_over());
  const Decision decision = old_run.bad();
  EXPECT_NE(testing::internal::GetCapturedStderr().find("epoch 2"), std::string::npos);
  EXPECT_EQ(decision.exit_code(), 83);
  EXPECT_NE(decision.reason.find("taken over"), std::string::npos) << decision.reason;
  old_run.finish();
  EXPECT_EQ(read_file(temp / "run/events.jsonl"), record);
  EXPECT_EQ(read_file(temp / "run/state"), state);
  EXPECT_EQ(new_run.bad().action, Action::kSkip);
  EXPECT_EQ(new_run.saved().total_skips(), 2u);
}

TEST(RunMemory, OfTwoRunsOfTheSameEpochTheOneThatWroteLastHasTheFolder) {
  const TempDir temp;
  Restartable first(temp / "run", kManySkips);
  ASSERT_TRUE(first.start().ok());
  RunState state = first.saved();
  ASSERT_EQ(unlink((temp / "run/state").c_str()), 0);
  state.set_holder("host=elsewhere pid=1 run=0000000000000001");
  ASSERT_TRUE(write_state(temp / "run", state).ok());
  testing::internal::CaptureStderr();
  EXPECT_EQ(first.bad().exit_code(), 83);
  EXPECT_NE(testing::internal::GetCapturedStderr().find("elsewhere"), std::string::npos);
}

}  // namespace
}  // namespace holdfast
