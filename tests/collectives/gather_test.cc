#include "collectives/gather_cases.h"
#include "holdfast/collectives/thread_collective.h"

namespace holdfast {
namespace {

class CappedGather : public testing::TestWithParam<int> {};

// Threads are one node.
TEST_P(CappedGather, KeepsTheLowestRanksOfTheNode) {
  ThreadGroup(GetParam()).run([](Collective& collective) {
    expect_capped_gathers(collective, [](int) { return 0; });
  });
}

TEST_P(CappedGather, WithoutACapAllArrive) {
  ThreadGroup(GetParam()).run([](Collective& collective) {
    std::vector<Bytes> all;
    EXPECT_TRUE(collective.gather(std::to_string(collective.rank()), &all).ok());
    if (collective.rank() != 0) return;
    EXPECT_EQ(all.size(), static_cast<std::size_t>(collective.size()));
    for (std::size_t r = 0; r < all.size(); ++r) EXPECT_EQ(all[r], std::to_string(r));
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, CappedGather, testing::Values(1, 2, 3, 4, 8),
                         [](const auto& param) { return std::to_string(param.param); });

}  // namespace
}  // namespace holdfast
