#include "holdfast/coord/rate_rules.h"

#include <gtest/gtest.h>

#include "coord/events.h"
#include "coord/sample_incident.h"
#include "count_allocations.h"
#include "holdfast/coord/coordinator.h"
#include "holdfast/coord/policy.h"
#include "holdfast/coord/policy.pb.h"

namespace holdfast {
namespace {

constexpr char kManySkips[] = "max_total_skips: 100000 max_consecutive_skips: 100000 ";

Policy policy_of(const std::string& text) {
  Policy policy;
  const Status status = parse_policy(kManySkips + text, &policy);
  EXPECT_TRUE(status.ok()) << status.to_string();
  return policy;
}

SkipRecord seen_on(int rank, const std::string& tensor, Stage stage = Stage::kBackward) {
  return {0, stage, rank, "node" + std::to_string(rank), tensor};
}

// Rules as attempts come in.
struct Rules {
  explicit Rules(const std::string& text) : rules(policy_of(text)) {}
  std::optional<RateChange> clean() {
    rules.count_attempt();
    return rules.next_change();
  }
  std::optional<RateChange> skip(const SkipRecord& seen = seen_on(2, "w")) {
    rules.count_attempt();
    rules.count_skip(seen);
    return rules.next_change();
  }
  RateRules rules;
};

TEST(RateRules, AWarningIsRaisedOnceAndClearedOnceAtHalf) {
  Rules run("rate_rules { name: 'r' window_attempts: 10 max_skips: 2 least_attempts: 1 }");
  EXPECT_FALSE(run.skip());
  EXPECT_FALSE(run.skip());
  const auto raised = run.skip();
  ASSERT_TRUE(raised);
  EXPECT_TRUE(raised->raised);
  EXPECT_EQ(raised->rule, "r");
  EXPECT_EQ(raised->skips, 3u);
  EXPECT_EQ(raised->attempts, 3u);
  EXPECT_EQ(raised->fraction(), 1.0);
  EXPECT_EQ(run.rules.raised(), std::vector<std::string>{"r"});
  EXPECT_FALSE(run.skip());  // 4 of 4: still, and not again
  // Skips 1 to 4 leave at attempts 11 to 14: with 3 and 2 left it is not half yet.
  for (int attempt = 5; attempt <= 12; ++attempt) EXPECT_FALSE(run.clean()) << attempt;
  const auto cleared = run.clean();
  ASSERT_TRUE(cleared);
  EXPECT_FALSE(cleared->raised);
  EXPECT_EQ(cleared->skips, 1u);
  EXPECT_EQ(cleared->attempts, 10u);
  EXPECT_TRUE(run.rules.raised().empty());
  for (int i = 0; i < 20; ++i) EXPECT_FALSE(run.clean());
}

TEST(RateRules, ARateAtTheLimitDoesNotFlap) {
  Rules run("rate_rules { name: 'r' window_attempts: 10 max_skips: 2 least_attempts: 1 }");
  int changes = 0;
  for (int i = 0; i < 400; ++i) changes += (i % 4 == 0 ? run.skip() : run.clean()).has_value();
  EXPECT_EQ(changes, 1);  // between 2 and 3 skips in the window, all the time
}

TEST(RateRules, ARunThatIsTooYoungHasNoRate) {
  Rules run("rate_rules { name: 'r' window_attempts: 10 max_skips: 0 least_attempts: 4 }");
  EXPECT_FALSE(run.skip());
  EXPECT_FALSE(run.clean());
  EXPECT_FALSE(run.clean());
  const auto raised = run.clean();
  ASSERT_TRUE(raised);
  EXPECT_EQ(raised->skips, 1u);
  EXPECT_EQ(raised->attempts, 4u);
}

TEST(RateRules, SeveralWindowsAtOnceEachHaveTheirSay) {
  Rules run(
      "rate_rules { name: 'short' window_attempts: 3 max_skips: 1 least_attempts: 1 }"
      "rate_rules { name: 'long' window_attempts: 100 max_skips: 3 least_attempts: 1 }");
  EXPECT_FALSE(run.skip());
  EXPECT_EQ(run.skip()->rule, "short");
  for (int i = 0; i < 3; ++i) run.clean();
  EXPECT_TRUE(run.rules.raised().empty());
  for (int i = 0; i < 2; ++i) run.clean();
  EXPECT_FALSE(run.skip());
  for (int i = 0; i < 5; ++i) run.clean();
  EXPECT_EQ(run.skip()->rule, "long");
  EXPECT_EQ(run.rules.raised(), std::vector<std::string>{"long"});
}

TEST(RateRules, AnAlertSaysWhatTheSkipsHaveInCommonAndWhatIsNew) {
  Rules run("rate_rules { name: 'r' window_attempts: 4 max_skips: 2 least_attempts: 1 }");
  run.skip(seen_on(0, "embedding", Stage::kForward));
  run.skip(seen_on(1, "conv", Stage::kBackward));
  for (int i = 0; i < 10; ++i) run.clean();
  run.skip(seen_on(3, "conv", Stage::kBackward));
  run.skip(seen_on(2, "conv", Stage::kBackward));
  const auto raised = run.skip(seen_on(3, "fc", Stage::kBackward));
  ASSERT_TRUE(raised);
  EXPECT_EQ(raised->in_window.skips, 3u);
  EXPECT_EQ(raised->in_window.stage.value, "backward");
  EXPECT_EQ(raised->in_window.stage.skips, 3u);
  EXPECT_EQ(raised->in_window.rank.value, "3");
  EXPECT_EQ(raised->in_window.rank.skips, 2u);
  EXPECT_EQ(raised->in_window.host.value, "node3");
  EXPECT_EQ(raised->in_window.tensor.value, "conv");
  EXPECT_EQ(raised->before.skips, 2u);
  EXPECT_EQ(raised->before.rank.value, "0");
  EXPECT_EQ(raised->changed(), (std::vector<std::string>{"rank", "host"}));
}

TEST(RateRules, CalibrationCountsOnlyWhenItIsCharged) {
  const std::string rule = "rate_rules { name: 'r' window_attempts: 10 max_skips: 2 least_attempts: 1 }";
  for (const bool charged : {false, true}) {
    Rules run(rule);
    for (int i = 0; i < 3; ++i) {
      run.rules.count_attempt();
      run.rules.count_pending(seen_on(2, "w"));
      EXPECT_FALSE(run.rules.next_change());
    }
    run.rules.settle_pending(charged);
    EXPECT_EQ(run.rules.next_change().has_value(), charged);
    EXPECT_EQ(run.rules.skips().size(), charged ? 3u : 0u);
  }
}

TEST(RateRules, AbortIsForTheSkipThatIsOneTooMany) {
  Rules run("rate_rules { name: 'stop-it' window_attempts: 5 max_skips: 2 least_attempts: 4 action: ABORT }");
  EXPECT_FALSE(run.skip());
  EXPECT_FALSE(run.skip());
  run.rules.count_attempt();
  EXPECT_FALSE(run.rules.broken_by_a_skip()) << "a young run has no rate";
  run.rules.count_skip(seen_on(2, "w"));
  run.rules.count_attempt();
  ASSERT_TRUE(run.rules.broken_by_a_skip());
  EXPECT_FALSE(run.rules.broken_by_a_skip()->rolls_back);
  const std::string reason = run.rules.broken_by_a_skip()->why;
  EXPECT_NE(reason.find("'stop-it'"), std::string::npos) << reason;
  EXPECT_NE(reason.find("2 skips in 5 attempts"), std::string::npos) << reason;
  EXPECT_NE(reason.find("number 4 in 4"), std::string::npos) << reason;
  EXPECT_FALSE(run.rules.next_change()) << "it is no warning";
}

TEST(RateRules, RollBackIsForTheSkipThatIsOneTooMany) {
  Rules run(
      "rate_rules { name: 'back' window_attempts: 5 max_skips: 1 least_attempts: 1 action: ROLL_BACK }");
  EXPECT_FALSE(run.skip());
  run.rules.count_attempt();
  ASSERT_TRUE(run.rules.broken_by_a_skip());
  EXPECT_TRUE(run.rules.broken_by_a_skip()->rolls_back);
  EXPECT_FALSE(run.rules.next_change()) << "it is no warning";
}

TEST(RateRules, AReductionHasNoOriginAndSeveralOriginsAreNone) {
  EXPECT_EQ(skip_record(one_nan(2)).rank, 2);
  EXPECT_EQ(skip_record(one_nan(2)).host, "node2");
  Incident two = one_nan(2);
  two.views.push_back(sample_view(3, {{Stage::kBackward, "conv1.weight", 1, {1, 0, 0}, 0}}));
  EXPECT_EQ(skip_record(two).rank, -1);
  EXPECT_EQ(skip_record(two).tensor, "conv1.weight");
  Incident sum = sample_incident(4, [](Record& record) { record.add_bad(Stage::kReduction, {0, 1, 0}); });
  sum.views = {sample_view(1, {{Stage::kReduction, "w", 0, {0, 1, 0}, -1}})};
  EXPECT_EQ(skip_record(sum).rank, -1);
  EXPECT_EQ(skip_record(exception_on(1, "boom")).rank, 1);
}

// Rank 0 with its folder.
struct Rank0 {
  explicit Rank0(const std::string& text) {
    const Status status = Coordinator::create(policy_of(text), run_dir, &coordinator);
    EXPECT_TRUE(status.ok()) << status.to_string();
  }
  Decision bad() {
    Incident incident = one_nan(2);
    incident.attempt = attempt++;
    return coordinator->handle(incident);
  }
  void clean() { coordinator->update_applied(1, attempt++, 0); }

  const TempDir temp;
  const std::string run_dir = temp / "run";
  std::unique_ptr<Coordinator> coordinator;
  std::uint64_t attempt = 0;
};

TEST(CoordinatorRates, AnAlertIsOnRecordWithWhoMayOrderWhat) {
  Rank0 rank0(
      "rate_rules { name: 'r' window_attempts: 4 max_skips: 1 least_attempts: 1 }"
      "stage_owners { backward: 'kernels' forward: 'model' }"
      "authorities { resume: 'lead' quarantine: 'hardware' }");
  rank0.bad();
  rank0.bad();
  for (int i = 0; i < 8; ++i) rank0.clean();
  const auto raised = events_named(rank0.run_dir, "alert_raised");
  ASSERT_EQ(raised.size(), 1u);
  EXPECT_EQ(raised[0]["rule"], "r");
  EXPECT_EQ(raised[0]["attempt"], 1);
  EXPECT_EQ(raised[0]["skips"], 2);
  EXPECT_EQ(raised[0]["attempts"], 2);
  EXPECT_EQ(raised[0]["fraction"], 1.0);
  EXPECT_EQ(raised[0]["in_window"]["tensor"]["value"], "conv1.weight");
  EXPECT_EQ(raised[0]["in_window"]["rank"]["skips"], 2);
  EXPECT_EQ(raised[0]["authorities"], (Json{{"quarantine", "hardware"}, {"resume", "lead"}}));
  const auto cleared = events_named(rank0.run_dir, "alert_cleared");
  ASSERT_EQ(cleared.size(), 1u);
  EXPECT_EQ(cleared[0]["attempt"], 5);  // when both have left the window
  const Json skip = events_named(rank0.run_dir, "attempt_skipped").at(0);
  EXPECT_EQ(skip["stage_owner"], "kernels");
  EXPECT_EQ(skip["authorities"]["resume"], "lead");
}

// Each clean attempt of every run pays for this.
TEST(CoordinatorRates, ACleanAttemptAllocatesNothing) {
  Rank0 rank0(
      "rate_rules { name: 'short' window_attempts: 8 max_skips: 5 least_attempts: 1 }"
      "rate_rules { name: 'long' window_attempts: 10000 max_skips: 5 least_attempts: 1 }");
  for (int i = 0; i < 5; ++i) rank0.bad();
  rank0.clean();  // ends the row of skips, which is written
  rank0.coordinator->metrics().set_watched("a name that is too long to be kept within a string", 1);
  const long before = g_allocations;
  for (int i = 0; i < 100; ++i) {
    rank0.clean();  // skips leave the short window meanwhile
    rank0.coordinator->metrics().set_watched("a name that is too long to be kept within a string", i);
    EXPECT_FALSE(rank0.coordinator->stop_requested());
  }
  EXPECT_EQ(g_allocations - before, 0);
}

TEST(CoordinatorRates, AnAbortNamesTheRuleAndIsNotCounted) {
  Rank0 rank0("rate_rules { name: 'r' window_attempts: 4 max_skips: 1 least_attempts: 1 action: ABORT }");
  EXPECT_EQ(rank0.bad().action, Action::kSkip);
  for (int i = 0; i < 4; ++i) rank0.clean();
  EXPECT_EQ(rank0.bad().action, Action::kSkip);
  const Decision decision = rank0.bad();
  EXPECT_EQ(decision.exit_code(), 81);
  EXPECT_NE(decision.reason.find("rate rule 'r'"), std::string::npos) << decision.reason;
  EXPECT_NE(decision.reason.find("conv1.weight"), std::string::npos) << decision.reason;
  const Json aborted = events_named(rank0.run_dir, "aborted").at(0);
  EXPECT_EQ(aborted["exit_code"], 81);
  EXPECT_EQ(aborted["total"], 2);
}

}  // namespace
}  // namespace holdfast
