#include "holdfast/coord/budget.h"

#include <gtest/gtest.h>

#include "holdfast/coord/policy.h"
#include "holdfast/coord/policy.pb.h"

namespace holdfast {
namespace {

Policy limits(std::uint64_t total, std::uint64_t consecutive) {
  Policy policy;
  policy.set_max_total_skips(total);
  policy.set_max_consecutive_skips(consecutive);
  return policy;
}

TEST(SkipBudget, CountsInAllAndInARow) {
  SkipBudget budget;
  budget.count_skip();
  budget.count_skip();
  EXPECT_EQ(budget.total(), 2u);
  EXPECT_EQ(budget.consecutive(), 2u);
  budget.count_update();
  EXPECT_EQ(budget.total(), 2u);
  EXPECT_EQ(budget.consecutive(), 0u);
  budget.count_skip();
  EXPECT_EQ(budget.total(), 3u);
  EXPECT_EQ(budget.consecutive(), 1u);
}

TEST(SkipBudget, AllowsExactlyAsManyInARowAsThePolicySays) {
  SkipBudget budget;
  const Policy policy = limits(100, 3);
  for (int i = 0; i < 3; ++i, budget.count_skip()) EXPECT_TRUE(budget.allows_another(policy)) << i;
  EXPECT_FALSE(budget.allows_another(policy));
  budget.count_update();
  EXPECT_TRUE(budget.allows_another(policy));
}

TEST(SkipBudget, AllowsExactlyAsManyInAllAsThePolicySays) {
  SkipBudget budget;
  const Policy policy = limits(3, 100);
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(budget.allows_another(policy)) << i;
    budget.count_skip();
    budget.count_update();
  }
  EXPECT_FALSE(budget.allows_another(policy));
}

TEST(SkipBudget, ABudgetOfZeroAllowsNone) {
  EXPECT_FALSE(SkipBudget().allows_another(limits(0, 10)));
  EXPECT_FALSE(SkipBudget().allows_another(limits(10, 0)));
  EXPECT_TRUE(SkipBudget().allows_another(limits(1, 1)));
}

}  // namespace
}  // namespace holdfast
