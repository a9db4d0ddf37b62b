#include "holdfast/collectives/status.h"

#include <gtest/gtest.h>

#include <utility>
#include <vector>

namespace holdfast {
namespace {

TEST(Status, IsOkUnlessSaidOtherwise) {
  const Status status;
  EXPECT_TRUE(status.ok());
  EXPECT_EQ(status.exit_code(), 0);
  EXPECT_EQ(status.message(), "");
  EXPECT_EQ(status.to_string(), "OK");
  EXPECT_TRUE(Status::ok_status().ok());
}

TEST(Status, KeepsItsCodeAndItsSentence) {
  const Status status = Status::usage("policy.textproto:3: unknown field");
  EXPECT_FALSE(status.ok());
  EXPECT_EQ(status.code(), StatusCode::kUsage);
  EXPECT_EQ(status.message(), "policy.textproto:3: unknown field");
  EXPECT_EQ(status.to_string(), "USAGE (64): policy.textproto:3: unknown field");
  EXPECT_EQ(Status::internal("x").to_string(), "INTERNAL (80): x");
}

// Schedulers and operators' scripts test for these numbers.
TEST(Status, ExitCodesAndTheirNamesAreFixed) {
  const std::vector<std::pair<int, const char*>> fixed = {
      {0, "OK"},
      {64, "USAGE"},
      {80, "INTERNAL"},
      {81, "BUDGET_EXHAUSTED"},
      {82, "LOSS_SCALE_EXHAUSTED"},
      {83, "RANKS_DISAGREE"},
      {84, "RANK_MISSING"},
      {85, "NO_CLEAN_GENERATION"},
      {86, "STOPPED_BY_OPERATOR"},
      {87, "RESTART_NOT_ACKNOWLEDGED"},
  };
  for (const auto& [code, name] : fixed) {
    EXPECT_EQ(status_code_name(static_cast<StatusCode>(code)), name);
    EXPECT_EQ(Status(static_cast<StatusCode>(code), "").exit_code(), code);
  }
}

TEST(Status, ACodeThatIsNotKnownStillPrints) {
  EXPECT_EQ(Status(static_cast<StatusCode>(99), "from a newer version").to_string(),
            "UNKNOWN (99): from a newer version");
}

}  // namespace
}  // namespace holdfast
