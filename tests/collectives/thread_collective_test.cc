#include "holdfast/collectives/thread_collective.h"

#include <gtest/gtest.h>

#include <atomic>
#include <tuple>

#include "collectives/conformance.h"
#include "collectives/failure_cases.h"

namespace holdfast {
namespace {

using std::chrono::milliseconds;

class ThreadConformance : public testing::TestWithParam<std::tuple<conformance::Case, int>> {};

TEST_P(ThreadConformance, Holds) {
  const auto& [test, size] = GetParam();
  ThreadGroup(size).run(test.on_each_rank);
}

INSTANTIATE_TEST_SUITE_P(Backends, ThreadConformance,
                         testing::Combine(testing::ValuesIn(conformance::cases()),
                                          testing::Values(1, 2, 3, 4, 8)),
                         [](const auto& param) {
                           return std::string(std::get<0>(param.param).name) + "_on_" +
                                  std::to_string(std::get<1>(param.param));
                         });

TEST(ThreadGroup, RunsTheBodyOnceOnEachRank) {
  std::atomic<int> calls{0};
  std::atomic<int> rank_sum{0};
  ThreadGroup(8).run([&](Collective& collective) {
    EXPECT_EQ(collective.size(), 8);
    ++calls;
    rank_sum += collective.rank();
  });
  EXPECT_EQ(calls, 8);
  EXPECT_EQ(rank_sum, 28);
}

class ThreadFailure : public testing::TestWithParam<conformance::Operation> {};
INSTANTIATE_TEST_SUITE_P(Operations, ThreadFailure, testing::ValuesIn(conformance::operations()),
                         [](const auto& param) { return std::string(param.param.name); });

TEST_P(ThreadFailure, ARankThatDoesNotComeIsMissedByTheOthersWithinTheirPatience) {
  for (const int absent : {0, 2}) {
    ThreadGroup group(3, milliseconds(100));
    const auto start = std::chrono::steady_clock::now();
    group.run([&](Collective& collective) {
      if (collective.rank() != absent) conformance::expect_failure(collective, GetParam());
    });
    EXPECT_GE(std::chrono::steady_clock::now() - start, milliseconds(100));
  }
}

TEST(ThreadGroup, OneMissingRankFailsEveryLaterCollectiveOfTheGroup) {
  ThreadGroup group(3, milliseconds(100));
  group.run([](Collective& collective) {
    if (collective.rank() == 1) return;
    Record record;
    EXPECT_EQ(collective.reduce(record).code(), StatusCode::kRankMissing);
  });
  group.run([](Collective& collective) {  // now all are there, too late
    Record record;
    Bytes bytes = "x";
    std::vector<Bytes> all;
    EXPECT_EQ(collective.reduce(record).code(), StatusCode::kRankMissing);
    EXPECT_EQ(collective.gather(bytes, &all).code(), StatusCode::kRankMissing);
    EXPECT_EQ(collective.broadcast(&bytes).code(), StatusCode::kRankMissing);
    EXPECT_EQ(agree_on_status(collective, Status()).code(), StatusCode::kRankMissing);
    EXPECT_EQ(bytes, "x");
  });
}

}  // namespace
}  // namespace holdfast
