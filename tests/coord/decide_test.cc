#include "holdfast/coord/decide.h"

#include <gtest/gtest.h>

#include <functional>
#include <vector>

#include "coord/sample_incident.h"
#include "holdfast/coord/policy.h"
#include "holdfast/coord/policy.pb.h"

namespace holdfast {
namespace {

Policy policy_of(const std::string& text) {
  Policy policy;
  EXPECT_TRUE(parse_policy(text, &policy).ok());
  return policy;
}

SkipBudget after_skips(int total, int consecutive) {
  SkipBudget budget;
  for (int i = 0; i < total - consecutive; ++i) budget.count_skip();
  budget.count_update();
  for (int i = 0; i < consecutive; ++i) budget.count_skip();
  return budget;
}

bool mentions(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

struct Row {
  const char* what;
  std::function<void(Record&)> edit;
  const char* policy;
  int total;
  int consecutive;
  Action action;
  int code;
};

void nan_at_loss(Record& r) { r.add_bad(Stage::kLoss, {1, 0, 0}); }
void error(Record& r) { r.set_error(); }
void stop(Record& r) { r.set_request(Request::kStop); }
void update_failed(Record& r) { r.set_update_failed(); }
void disagree(Record& r) { r.lanes()[26] += 1; }
void one_missing(Record& r) { r.lanes()[25] -= 1; }
void nan_and_error(Record& r) { nan_at_loss(r), error(r); }

TEST(Decide, EachKindOfVerdictUnderEachPolicy) {
  const std::vector<Row> table = {
      {"non-finite, defaults", nan_at_loss, "", 0, 0, Action::kSkip, 0},
      {"non-finite, last skip in a row", nan_at_loss, "", 9, 9, Action::kSkip, 0},
      {"non-finite, too many in a row", nan_at_loss, "", 10, 10, Action::kAbort, 81},
      {"non-finite, last skip in all", nan_at_loss, "", 99, 0, Action::kSkip, 0},
      {"non-finite, too many in all", nan_at_loss, "", 100, 0, Action::kAbort, 81},
      {"non-finite, budget of none", nan_at_loss, "max_total_skips: 0", 0, 0, Action::kAbort, 81},
      {"non-finite, none in a row", nan_at_loss, "max_consecutive_skips: 0", 0, 0, Action::kAbort, 81},
      {"non-finite, the first", nan_at_loss, "on_first: ABORT", 0, 0, Action::kAbort, 81},
      {"error, defaults", error, "", 0, 0, Action::kAbort, 80},
      {"error, on_first is not about errors", error, "on_first: ABORT on_error: SKIP", 0, 0, Action::kSkip,
       0},
      {"error, SKIP", error, "on_error: SKIP", 0, 0, Action::kSkip, 0},
      {"error, SKIP without budget", error, "on_error: SKIP", 10, 10, Action::kAbort, 81},
      {"non-finite and error, defaults", nan_and_error, "", 0, 0, Action::kAbort, 80},
      {"non-finite and error, SKIP", nan_and_error, "on_error: SKIP", 0, 0, Action::kSkip, 0},
      {"update failed", update_failed, "on_error: SKIP", 0, 0, Action::kAbort, 83},
      {"disagree", disagree, "on_error: SKIP", 0, 0, Action::kAbort, 83},
      {"missing", one_missing, "on_error: SKIP", 0, 0, Action::kAbort, 84},
      {"stop", stop, "", 0, 0, Action::kStop, 86},
      {"stop, budget spent", stop, "on_first: ABORT", 100, 10, Action::kStop, 86},
      {"rule fired", [](Record& r) { r.set_request(Request::kRuleFired); }, "", 0, 0, Action::kSkip, 0},
      {"roll back", [](Record& r) { r.set_request(Request::kRollBack); }, "", 0, 0, Action::kAbort, 80},
      {"capture", [](Record& r) { r.set_request(Request::kCapture); }, "", 0, 0, Action::kAbort, 80},
      {"clean", [](Record&) {}, "", 0, 0, Action::kAbort, 80},
  };
  for (const Row& row : table) {
    const Decision decision =
        decide(policy_of(row.policy), after_skips(row.total, row.consecutive), sample_incident(4, row.edit));
    EXPECT_EQ(action_name(decision.action), action_name(row.action)) << row.what;
    EXPECT_EQ(decision.exit_code(), row.code) << row.what;
    EXPECT_FALSE(decision.reason.empty()) << row.what;
  }
}

TEST(Decide, NeverAppliesWhateverTheRecordHolds) {
  const Policy lenient = policy_of("on_error: SKIP max_total_skips: 1000000 max_consecutive_skips: 1000000");
  for (std::size_t lane = 0; lane < Record::kLanes; ++lane) {
    const Incident incident = sample_incident(4, [&](Record& r) { r.lanes()[lane] += 1; });
    EXPECT_FALSE(decide(lenient, SkipBudget(), incident).apply()) << lane;
  }
}

// "The first non-finite attempt of a run": an earlier skip for an exception was not one.
TEST(Decide, OnFirstAbortsTheFirstNonFiniteAttemptEvenAfterOtherSkips) {
  const Decision decision =
      decide(policy_of("on_first: ABORT on_error: SKIP"), after_skips(1, 0), one_nan(2));
  EXPECT_EQ(action_name(decision.action), "ABORT");
  EXPECT_EQ(decision.exit_code(), 81);
}

// A trainer that throws because its loss is NaN does not get around on_first.
TEST(Decide, OnFirstAbortsAnAttemptThatIsNonFiniteAndThrewToo) {
  const Decision decision =
      decide(policy_of("on_first: ABORT on_error: SKIP"), SkipBudget(), sample_incident(4, nan_and_error));
  EXPECT_EQ(action_name(decision.action), "ABORT");
  EXPECT_EQ(decision.exit_code(), 81);
}

TEST(Decide, TheReasonNamesWhereTheValueWasSeen) {
  const Decision skip = decide(policy_of(""), SkipBudget(), one_nan(2));
  EXPECT_EQ(skip.reason, "1 non-finite value at backward, first on rank 2 (host node2) in conv1.weight[71]");
  const Decision first = decide(policy_of("on_first: ABORT"), SkipBudget(), one_nan(2));
  EXPECT_TRUE(mentions(first.reason, "conv1.weight[71]")) << first.reason;
  EXPECT_TRUE(mentions(first.reason, "on_first: ABORT")) << first.reason;
  const Decision spent = decide(policy_of(""), after_skips(12, 10), one_nan(2));
  EXPECT_TRUE(mentions(spent.reason, "12 of 100 in total, 10 of 10 in a row")) << spent.reason;
  EXPECT_TRUE(mentions(spent.reason, "conv1.weight[71]")) << spent.reason;
}

TEST(Decide, TheReasonQuotesTheException) {
  const Decision decision = decide(policy_of(""), SkipBudget(), exception_on(1, "cannot read shard 7"));
  EXPECT_TRUE(mentions(decision.reason, "rank 1 (host node1) at forward: cannot read shard 7"))
      << decision.reason;
}

// The run ends for the exception: an operator who reads only this line must find it.
TEST(Decide, TheReasonQuotesTheExceptionEvenBesideNonFiniteValues) {
  Incident incident = sample_incident(4, nan_and_error);
  incident.views = {exception_on(1, "cannot read shard 7").views[0]};
  const Decision decision = decide(policy_of(""), SkipBudget(), incident);
  EXPECT_EQ(decision.exit_code(), 80);
  EXPECT_TRUE(mentions(decision.reason, "cannot read shard 7")) << decision.reason;
}

TEST(Decide, TheReasonQuotesAFailedUpdateEvenBesideNonFiniteValues) {
  Incident incident = sample_incident(4, [](Record& r) { nan_at_loss(r), update_failed(r); });
  incident.views = {exception_on(3, "out of memory").views[0]};
  const Decision decision = decide(policy_of(""), SkipBudget(), incident);
  EXPECT_EQ(decision.exit_code(), 83);
  EXPECT_TRUE(mentions(decision.reason, "out of memory")) << decision.reason;
}

TEST(Decide, TheReasonNamesTheRanksThatDisagree) {
  Incident incident = sample_incident(4, disagree);
  for (int r = 0; r < 4; ++r) incident.views.push_back(sample_view(r, {}));
  incident.views[2].agreement.attempt = 8;
  const Decision decision = decide(policy_of(""), SkipBudget(), incident);
  EXPECT_TRUE(mentions(decision.reason, "rank 0,1,3 at epoch 1, attempt 7")) << decision.reason;
  EXPECT_TRUE(mentions(decision.reason, "rank 2 at epoch 1, attempt 8")) << decision.reason;
}

TEST(Decide, GivesTheSameAnswerEveryTime) {
  const Policy policy = policy_of("");
  const SkipBudget budget = after_skips(5, 2);
  const Decision once = decide(policy, budget, one_nan(0));
  const Decision twice = decide(policy, budget, one_nan(0));
  EXPECT_EQ(encode_decision(once), encode_decision(twice));
  EXPECT_EQ(budget.total(), 5u);
}

}  // namespace
}  // namespace holdfast
