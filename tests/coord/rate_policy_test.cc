// The policy's rate rules, owners and authorities as they are written.
#include <gtest/gtest.h>

#include "holdfast/coord/policy.h"
#include "holdfast/coord/policy.pb.h"

namespace holdfast {
namespace {

Policy parsed(const std::string& text) {
  Policy policy;
  const Status status = parse_policy(text, &policy);
  EXPECT_TRUE(status.ok()) << text << ": " << status.to_string();
  return policy;
}

void expect_refused(const std::string& text, const std::string& says) {
  Policy policy;
  const Status status = parse_policy(text, &policy);
  EXPECT_EQ(status.code(), StatusCode::kUsage) << text;
  EXPECT_NE(status.message().find(says), std::string::npos) << status.message();
}

TEST(RatePolicy, ByDefaultThereIsAQuickRuleAndASensitiveOne) {
  const Policy policy = parsed("");
  ASSERT_EQ(policy.rate_rules_size(), 2);
  EXPECT_EQ(policy.rate_rules(0).name(), "burst");
  EXPECT_EQ(policy.rate_rules(0).window_attempts(), 200u);
  EXPECT_EQ(policy.rate_rules(0).max_skips(), 3u);
  EXPECT_EQ(policy.rate_rules(0).action(), Policy::RateRule::WARN);
  EXPECT_EQ(policy.rate_rules(1).name(), "creep");
  EXPECT_EQ(policy.rate_rules(1).window_attempts(), 10'000u);
  EXPECT_EQ(policy.rate_rules(1).max_skips(), 10u);
  EXPECT_EQ(policy.rate_rules(1).action(), Policy::RateRule::WARN);
}

TEST(RatePolicy, AListReplacesTheDefaultsAndIsShownWhole) {
  const Policy policy = parsed("rate_rules { name: 'r' window_attempts: 30 max_skips: 0 action: ABORT }");
  ASSERT_EQ(policy.rate_rules_size(), 1);
  EXPECT_EQ(policy.rate_rules(0).least_attempts(), 30u);
  const Policy json = parsed(
      R"({"rateRules": [{"name": "r", "windowAttempts": 30, "maxSkips": 0, "action": "ABORT", "leastAttempts": 30}]})");
  EXPECT_EQ(policy_hash(policy), policy_hash(json));
  EXPECT_EQ(policy_hash(parsed(policy_text(policy))), policy_hash(policy));
  EXPECT_EQ(policy_hash(parsed(policy_text(parsed("")))), policy_hash(parsed("")));
}

TEST(RatePolicy, TheLeastNumberOfAttemptsIsFiftyOrTheWindow) {
  for (const auto& [window, least] : {std::pair{49, 49}, {50, 50}, {51, 50}, {10000, 50}}) {
    const Policy policy =
        parsed("rate_rules { name: 'r' max_skips: 1 window_attempts: " + std::to_string(window) + " }");
    EXPECT_EQ(policy.rate_rules(0).least_attempts(), static_cast<std::uint64_t>(least));
  }
}

TEST(RatePolicy, RollBackIsRefusedByNameWhereThereAreNoCheckpoints) {
  EXPECT_TRUE(check_can_roll_back(parsed("")).ok());
  const Status refused = check_can_roll_back(
      parsed("rate_rules { name: 'heavy' window_attempts: 9 max_skips: 1 action: ROLL_BACK }"));
  EXPECT_EQ(refused.code(), StatusCode::kUsage);
  for (const char* part : {"ROLL_BACK", "'heavy'", "checkpoints"}) {
    EXPECT_NE(refused.message().find(part), std::string::npos) << refused.message();
  }
}

TEST(RatePolicy, WhatMakesNoSenseIsRefusedNamingTheRule) {
  const auto rule = [](const std::string& fields) { return "rate_rules { name: 'r' " + fields + " }"; };
  expect_refused("rate_rules { window_attempts: 9 max_skips: 1 }", "name");
  expect_refused("rate_rules { name: 'a b' window_attempts: 9 max_skips: 1 }", "'a b'");
  expect_refused("rate_rules { name: 'calibration_rate' window_attempts: 9 max_skips: 1 }", "loss_scale");
  expect_refused(rule("max_skips: 1"), "window_attempts");
  expect_refused(rule("window_attempts: 1"), "max_skips");
  expect_refused(rule("window_attempts: 0 max_skips: 1"), "window_attempts is 0");
  expect_refused(rule("window_attempts: 100001 max_skips: 1"), "100001");
  expect_refused(rule("window_attempts: 10000 max_skips: 4096"), "4096");
  expect_refused(rule("window_attempts: 9 max_skips: 1 least_attempts: 10"), "least_attempts is 10");
  expect_refused(rule("window_attempts: 9 max_skips: 1 least_attempts: 0"), "least_attempts is 0");
  expect_refused(rule("window_attempts: 9 max_skips: 1") + rule("window_attempts: 8 max_skips: 1"),
                 "another");
  expect_refused(rule("window_attempts: 9 max_skips: 1 colour: 3"), "colour");
  expect_refused(R"({"rateRules": [{"name": "r", "windowAttempts": 9, "maxSkips": 1, "action": 7}]})",
                 "enum");
  std::string many;
  for (int i = 0; i < 17; ++i) {
    many += "rate_rules { name: 'r" + std::to_string(i) + "' window_attempts: 9 max_skips: 1 } ";
  }
  expect_refused(many, "at most 16");
}

TEST(RatePolicy, MemoryFieldsHaveRanges) {
  EXPECT_EQ(parsed("").state_interval_attempts(), 1000u);
  EXPECT_EQ(parsed("").max_identical_failures(), 3u);
  expect_refused("state_interval_attempts: 0", "state_interval_attempts");
  expect_refused("max_identical_failures: 1", "max_identical_failures");
}

TEST(RatePolicy, OwnersAndAuthoritiesAreFieldsOfTheirOwn) {
  const Policy policy = parsed("stage_owners { backward: 'kernels' } authorities { resume: 'lead' }");
  EXPECT_EQ(policy.stage_owners().backward(), "kernels");
  EXPECT_EQ(policy.stage_owners().input(), "");
  EXPECT_EQ(policy.authorities().resume(), "lead");
  expect_refused("stage_owners { sideways: 'x' }", "sideways");
}

}  // namespace
}  // namespace holdfast
