// The guard over the NCCL backend.
#include "collectives/nccl_ranks.h"
#include "ranks/guarded_ranks.h"

namespace holdfast {
namespace {

TEST(NcclGuard, ANanOnOneRankMakesAllRanksSkipThatAttemptTogether) {
  stand_in::reset();
  constexpr int kRanks = 4;
  constexpr int kAttempts = 6;
  Decisions decisions(kRanks);
  std::vector<int> updates(kRanks);
  run_nccl(kRanks, [&](NcclCollective& collective) {
    const int rank = collective.rank();
    const auto guard = create_guard(collective, guard_options(kSkipAnything));
    ASSERT_NE(guard, nullptr);
    for (int i = 0; i < kAttempts; ++i) {
      const std::vector<float> gradient = {1, i == 3 && rank == 2 ? kNanF : 2, 3};
      decisions.add(rank, attempt(
                              *guard, [&] { observe_values(*guard, Stage::kBackward, "weights", gradient); },
                              [&] { ++updates[static_cast<std::size_t>(rank)]; }));
    }
    EXPECT_TRUE(guard->close().apply());
    EXPECT_EQ(guard->skips(), 1u);
  });
  const std::vector<Decision>& agreed = decisions.agreed();
  ASSERT_EQ(agreed.size(), static_cast<std::size_t>(kAttempts));
  for (int i = 0; i < kAttempts; ++i) EXPECT_EQ(agreed[static_cast<std::size_t>(i)].apply(), i != 3) << i;
  EXPECT_EQ(updates, std::vector<int>(kRanks, kAttempts - 1));
  expect_clean_end();
}

// A failed collective never gives APPLY, and says that a rank is missing.
TEST(NcclGuard, ALostCommunicatorEndsTheRunOnItsRankWithoutAnUpdate) {
  stand_in::reset();
  run_nccl(1, [&](NcclCollective& collective) {
    const auto guard = create_guard(collective, guard_options());
    ASSERT_NE(guard, nullptr);
    EXPECT_TRUE(attempt(*guard, [] {}).apply());
    bool updated = false;
    const Decision decision = attempt(
        *guard, [&] { collective.abort(); }, [&] { updated = true; });
    EXPECT_TRUE(decision.ends_run());
    EXPECT_EQ(decision.exit_code(), 84);
    EXPECT_FALSE(decision.agreed);
    EXPECT_FALSE(updated);
  });
  expect_clean_end();
}

}  // namespace
}  // namespace holdfast
