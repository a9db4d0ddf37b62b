#include "holdfast/coord/rollback.h"

#include <gtest/gtest.h>

#include <vector>

#include "coord/sample_incident.h"
#include "holdfast/coord/policy.h"
#include "holdfast/coord/policy.pb.h"
#include "holdfast/coord/state.pb.h"

namespace holdfast {
namespace {

// A NaN that the update of attempt `attempt` - 1 wrote on every rank.
Incident spoilt(std::uint64_t attempt, const std::string& tensor = "w") {
  Incident incident = sample_incident(4, [&](Record& sum) {
    for (int r = 0; r < 4; ++r) {
      Record record;
      record.set_update_failed();
      record.add_bad(Stage::kOptimizer, {1, 0, 0});
      sum += record;
    }
  });
  incident.attempt = attempt;
  incident.views = {sample_view(0, {{Stage::kOptimizer, tensor, 3, {1, 0, 0}, -1}})};
  return incident;
}

struct Rollbacks {
  explicit Rollbacks(const std::string& text = "") { EXPECT_TRUE(parse_policy(text, &policy).ok()); }

  // The attempt that is gone back to; a run that does is at it afterwards.
  std::optional<std::uint64_t> fail(std::uint64_t attempt, const std::string& tensor = "w") {
    last = choose_rollback(policy, spoilt(attempt, tensor), restored_at, generations, &state);
    if (!last.to) return std::nullopt;
    restored_at = last.to->attempt;
    state.set_restored_attempt(restored_at);
    return restored_at;
  }

  Policy policy;
  RunState state;
  std::uint64_t restored_at = 0;
  std::vector<GenerationId> generations = {{1, 0}, {1, 100}, {1, 200}};
  RollbackChoice last;
};

using Attempt = std::optional<std::uint64_t>;

TEST(GenerationId, NameAndNumbersAreOneAndTheSame) {
  EXPECT_EQ((GenerationId{1, 600}.name()), "e0001-a0000000600");
  EXPECT_EQ((GenerationId{123456, 98765432109}.name()), "e123456-a98765432109");
  for (const GenerationId id : {GenerationId{1, 600}, {0, 0}, {123456, 98765432109}, {~0ull, ~0ull}}) {
    GenerationId parsed;
    ASSERT_TRUE(parse_generation_name(id.name(), &parsed));
    EXPECT_EQ(parsed, id);
  }
  for (const char* name :
       {"", "e", "e0001", "e0001-a", "e1-a600", "e0001-a600", "e0001-a0000000600 ", " e0001-a0000000600",
        "e+001-a0000000600", "e0001-a-000000600", "e0001-a0000000600.partial", ".e0001-a0000000600.partial",
        "e0001-a99999999999999999999", "x0001-a0000000600", "set-aside"}) {
    GenerationId untouched{7, 7};
    EXPECT_FALSE(parse_generation_name(name, &untouched)) << name;
    EXPECT_EQ(untouched, (GenerationId{7, 7}));
  }
}

TEST(Rollback, GoesToTheNewestGeneration) {
  Rollbacks run;
  EXPECT_EQ(run.fail(250), Attempt(200));
  EXPECT_EQ(run.state.rollbacks(), 1u);
}

TEST(Rollback, TheSameFailureFallsBackOneGenerationAndThenStops) {
  Rollbacks run;
  EXPECT_EQ(run.fail(250), Attempt(200));
  EXPECT_EQ(run.fail(250), Attempt(200));
  EXPECT_EQ(run.fail(250), Attempt(100)) << "the third time";
  run.generations.push_back({4, 200});  // made again on the way
  EXPECT_EQ(run.fail(250), Attempt(100));
  EXPECT_EQ(run.fail(250), Attempt(100));
  EXPECT_EQ(run.fail(250), std::nullopt);
  EXPECT_EQ(run.last.code, StatusCode::kBudgetExhausted);
  EXPECT_TRUE(run.last.do_not_requeue);
  EXPECT_EQ(run.state.rollbacks(), 5u);
}

TEST(Rollback, AlwaysAtLoadPlusThreeIsTheSameFailureWhereverItWasLoaded) {
  Rollbacks run("max_identical_failures: 2");
  run.restored_at = 200;
  run.state.set_restored_attempt(200);
  EXPECT_EQ(run.fail(203), Attempt(200));
  EXPECT_EQ(run.fail(203), Attempt(100));
  EXPECT_EQ(run.fail(103), Attempt(100));
  EXPECT_EQ(run.fail(103), std::nullopt);
  EXPECT_TRUE(run.last.do_not_requeue);
}

TEST(Rollback, AnotherFailureBeginsAnew) {
  Rollbacks run("max_identical_failures: 2 max_rollbacks: 100");
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(run.fail(250, "w"), Attempt(200)) << i;
    EXPECT_EQ(run.fail(260, "w"), Attempt(200)) << i << ": another attempt";
    EXPECT_EQ(run.fail(260, "b"), Attempt(200)) << i << ": another tensor";
  }
}

TEST(Rollback, HasItsOwnBudget) {
  Rollbacks run("max_rollbacks: 2");
  EXPECT_TRUE(run.fail(210));
  EXPECT_TRUE(run.fail(220));
  EXPECT_FALSE(run.fail(230));
  EXPECT_EQ(run.last.code, StatusCode::kBudgetExhausted);
  EXPECT_FALSE(run.last.do_not_requeue);
  EXPECT_NE(run.last.why.find("2 of 2"), std::string::npos) << run.last.why;
}

TEST(Rollback, WithoutAGenerationThereIsNone) {
  Rollbacks run;
  run.generations.clear();
  EXPECT_FALSE(run.fail(5));
  EXPECT_EQ(run.last.code, StatusCode::kNoCleanGeneration);
  EXPECT_EQ(run.state.rollbacks(), 0u);
}

TEST(Rollback, WithoutAnEarlierGenerationTheSameFailureStopsTheRun) {
  Rollbacks run("max_identical_failures: 2");
  run.generations = {{1, 0}};
  EXPECT_EQ(run.fail(5), Attempt(0));
  EXPECT_FALSE(run.fail(5));
  EXPECT_EQ(run.last.code, StatusCode::kNoCleanGeneration);
  EXPECT_TRUE(run.last.do_not_requeue);
}

Incident diverged(const std::vector<std::vector<std::uint64_t>>& digests) {
  Incident incident =
      sample_incident(static_cast<int>(digests.size()), [](Record& sum) { sum.set_replica_proof(7); });
  incident.proven_tensors = {"a", "b", "c"};
  for (std::size_t r = 0; r < digests.size(); ++r) {
    incident.views.push_back(sample_view(static_cast<int>(r), {}));
    incident.views.back().replica_digests = digests[r];
  }
  return incident;
}

TEST(Divergence, NamesTheMinorityAndTheFirstTensorThatDiffers) {
  for (int odd = 0; odd < 4; ++odd) {
    std::vector<std::vector<std::uint64_t>> digests(4, {1, 2, 3});
    digests[static_cast<std::size_t>(odd)][1] = 9;
    const std::string n = std::to_string(odd);
    EXPECT_EQ(diverged(digests).describe(),
              "replicas differ: rank " + n + " (host node" + n + ") against the other 3, first in b");
  }
}

TEST(Divergence, OfTwoReplicasNamesBoth) {
  EXPECT_EQ(diverged({{1, 2, 3}, {1, 2, 4}}).describe(),
            "replicas differ: rank 0 (host node0), rank 1 (host node1) against each other, first in c");
}

TEST(Divergence, OfManyReplicaGroupsTheFirstEightAreNamed) {
  std::vector<std::vector<std::uint64_t>> digests;
  Incident incident;
  for (std::uint64_t r = 0; r < 20; ++r) digests.push_back({r, 2, 3});
  incident = diverged(digests);
  for (int r = 0; r < 20; ++r) incident.replica_groups.push_back("tp=" + std::to_string(10 + r / 2));
  incident.views[4].proven_tensors = {"head", "b", "c"};
  const std::string text = incident.describe();
  EXPECT_TRUE(text.starts_with(
      "replicas differ in tp=10: rank 0 (host node0), rank 1 (host node1) against each other, "
      "first in a; and in tp=11: rank 2 "))
      << text;
  EXPECT_NE(text.find("tp=12: rank 4 (host node4), rank 5 (host node5) against each other, first in head; "),
            std::string::npos)
      << text;
  EXPECT_TRUE(text.ends_with("first in a; and in 2 more groups")) << text;
}

}  // namespace
}  // namespace holdfast
