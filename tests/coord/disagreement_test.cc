// What rank 0 says when the ranks do not agree on what they decide about.
#include <gtest/gtest.h>

#include "coord/sample_incident.h"
#include "holdfast/coord/decide.h"
#include "holdfast/coord/policy.h"
#include "holdfast/coord/policy.pb.h"

namespace holdfast {
namespace {

constexpr Agreement kMost{1, 7, 0xab};

// Rank r claims claims[r].
Decision told(const std::vector<Agreement>& claims) {
  Incident incident =
      sample_incident(static_cast<int>(claims.size()), [](Record& sum) { sum.lanes()[26] += 1; });
  for (std::size_t r = 0; r < claims.size(); ++r) {
    RankView view = sample_view(static_cast<int>(r), {});
    view.agreement = claims[r];
    incident.views.push_back(view);
  }
  Policy policy;
  EXPECT_TRUE(parse_policy("", &policy).ok());
  return decide(policy, SkipBudget(), incident);
}

TEST(Disagreement, IsAnAbortWith83WhateverElseIsWrong) {
  Policy policy;
  ASSERT_TRUE(parse_policy("on_first: SKIP on_error: SKIP", &policy).ok());
  const Incident incident = sample_incident(4, [](Record& sum) {
    sum.lanes()[26] += 1;
    sum.set_error();
    sum.add_bad(Stage::kLoss, {1, 0, 0});
    sum.set_request(Request::kStop);
  });
  const Decision decision = decide(policy, SkipBudget(), incident);
  EXPECT_EQ(decision.action, Action::kAbort);
  EXPECT_EQ(decision.exit_code(), 83);
}

TEST(Disagreement, TheMinorityIsNamedAndTheOthersAreCounted) {
  EXPECT_EQ(told({kMost, kMost, {1, 8, 0xab}, kMost}).reason,
            "ranks disagree: rank 2 at epoch 1, attempt 8, policy ab; "
            "the other 3: rank 0,1,3 at epoch 1, attempt 7, policy ab");
}

TEST(Disagreement, EpochAndPolicyTellRanksApartToo) {
  EXPECT_EQ(told({{2, 7, 0xab}, kMost, kMost}).reason,
            "ranks disagree: rank 0 at epoch 2, attempt 7, policy ab; "
            "the other 2: rank 1,2 at epoch 1, attempt 7, policy ab");
  EXPECT_EQ(told({kMost, {1, 7, 0xffffffffffffffffu}, kMost}).reason,
            "ranks disagree: rank 1 at epoch 1, attempt 7, policy ffffffffffffffff; "
            "the other 2: rank 0,2 at epoch 1, attempt 7, policy ab");
}

TEST(Disagreement, OfTwoRanksBothAreNamed) {
  EXPECT_EQ(
      told({kMost, {1, 6, 0xab}}).reason,
      "ranks disagree: rank 0 at epoch 1, attempt 7, policy ab; rank 1 at epoch 1, attempt 6, policy ab");
}

TEST(Disagreement, OfTwoHalvesBothAreNamed) {
  EXPECT_EQ(
      told({kMost, {1, 6, 0xab}, kMost, {1, 6, 0xab}}).reason,
      "ranks disagree: rank 0,2 at epoch 1, attempt 7, policy ab; rank 1,3 at epoch 1, attempt 6, policy ab");
}

TEST(Disagreement, OfThreeCampsTheSmallestComesFirst) {
  EXPECT_EQ(
      told({{1, 9, 1}, {1, 9, 1}, kMost, kMost, kMost, {1, 5, 2}}).reason,
      "ranks disagree: rank 5 at epoch 1, attempt 5, policy 2; rank 0,1 at epoch 1, attempt 9, policy 1; "
      "the other 3: rank 2,3,4 at epoch 1, attempt 7, policy ab");
}

TEST(Disagreement, AHugeCampIsNamedByItsFirstSixteen) {
  std::vector<Agreement> claims(1000, kMost);
  for (std::size_t r = 0; r < 20; ++r) claims[r * 10].attempt = 8;
  EXPECT_EQ(
      told(claims).reason,
      "ranks disagree: rank 0,10,20,30,40,50,60,70,80,90,100,110,120,130,140,150 and 4 more at epoch 1, "
      "attempt 8, policy ab; the other 980: rank 1,2,3,4,5,6,7,8,9,11,12,13,14,15,16,17 and 964 more at "
      "epoch 1, attempt 7, policy ab");
}

}  // namespace
}  // namespace holdfast
