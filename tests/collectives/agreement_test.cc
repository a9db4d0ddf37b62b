#include <gtest/gtest.h>

#include <set>
#include <vector>

#include "holdfast/collectives/record.h"

namespace holdfast {
namespace {

constexpr Agreement kUsual = {1, 1000, 0x9f01};
const std::vector<Agreement> kOthers = {{2, 1000, 0x9f01},  // another epoch
                                        {1, 1001, 0x9f01},
                                        {1, 999, 0x9f01},    // a neighbouring attempt
                                        {1, 1000, 0x9f02}};  // another policy

std::vector<int> world_sizes() {
  std::vector<int> sizes;
  for (int n = 1; n <= 64; ++n) sizes.push_back(n);
  sizes.insert(sizes.end(), {100, 1023, 1024, 4096});
  return sizes;
}

std::vector<std::uint64_t> coefficients(int world_size) {
  std::vector<std::uint64_t> all;
  for (int r = 0; r < world_size; ++r) all.push_back(agreement_coefficient(r, world_size));
  return all;
}

// What the all-reduce gives when every rank passes kUsual.
std::uint64_t agreeing_sum(const std::vector<std::uint64_t>& c) {
  std::uint64_t sum = 0;
  for (const std::uint64_t coefficient : c) sum += coefficient * agreement_hash(kUsual);
  return sum;
}

// By how much the sum changes when the rank with this coefficient passes `other` instead.
std::uint64_t change(std::uint64_t coefficient, const Agreement& other) {
  return coefficient * (agreement_hash(other) - agreement_hash(kUsual));
}

TEST(Agreement, RanksThatAgreeSumToZeroAtEveryWorldSize) {
  for (const int n : world_sizes()) {
    const auto c = coefficients(n);
    std::uint64_t sum = 0;
    for (const std::uint64_t coefficient : c) sum += coefficient;
    EXPECT_EQ(sum, 0u) << n;
    EXPECT_EQ(agreeing_sum(c), 0u) << n;
  }
}

TEST(Agreement, AnyOneRankThatDiffersShowsAtEveryWorldSize) {
  for (const int n : world_sizes()) {
    if (n == 1) continue;
    const auto c = coefficients(n);
    for (int r = 0; r < n; ++r) {
      for (const Agreement& other : kOthers) {
        EXPECT_NE(agreeing_sum(c) + change(c[static_cast<std::size_t>(r)], other), 0u)
            << n << " ranks, rank " << r;
      }
    }
  }
}

TEST(Agreement, AnyTwoRanksThatDifferShow) {
  for (int n = 2; n <= 64; ++n) {
    const auto c = coefficients(n);
    for (std::size_t a = 0; a < c.size(); ++a) {
      for (std::size_t b = 0; b < a; ++b) {
        if (n == 2) {
          // Both ranks changed alike is agreement again; changed differently is not.
          EXPECT_EQ(change(c[a], kOthers[0]) + change(c[b], kOthers[0]), 0u);
        } else {
          EXPECT_NE(change(c[a], kOthers[1]) + change(c[b], kOthers[1]), 0u) << n << ": " << a << ", " << b;
        }
        EXPECT_NE(change(c[a], kOthers[0]) + change(c[b], kOthers[3]), 0u) << n << ": " << a << ", " << b;
        EXPECT_NE(change(c[a], kOthers[1]) + change(c[b], kOthers[2]), 0u) << n << ": " << a << ", " << b;
      }
    }
  }
}

TEST(Agreement, HalfTheRanksOneAttemptAheadShows) {
  for (const int n : world_sizes()) {
    if (n == 1) continue;
    const auto c = coefficients(n);
    std::uint64_t sum = agreeing_sum(c);
    for (int r = 0; r < n / 2; ++r) sum += change(c[static_cast<std::size_t>(r)], kOthers[1]);
    EXPECT_NE(sum, 0u) << n;
  }
}

TEST(Agreement, NoTwoRanksOfAWorldShareACoefficient) {
  const auto c = coefficients(4096);
  EXPECT_EQ(std::set<std::uint64_t>(c.begin(), c.end()).size(), c.size());
}

// A restored run repeats attempt numbers: only the epoch tells it from the run before.
TEST(Agreement, HashTellsEpochsAttemptsAndPoliciesApart) {
  std::set<std::uint64_t> hashes;
  std::size_t made = 0;
  for (std::uint64_t epoch = 0; epoch < 8; ++epoch) {
    for (std::uint64_t attempt = 0; attempt < 256; ++attempt) {
      for (std::uint64_t policy = 0; policy < 4; ++policy, ++made) {
        hashes.insert(agreement_hash({epoch, attempt, policy}));
      }
    }
  }
  EXPECT_EQ(hashes.size(), made);
  EXPECT_EQ(agreement_hash(kUsual), agreement_hash(kUsual));
}

// Lanes of several groups in one sum: each must come to zero by itself, and none may make up for another.
TEST(Agreement, CoefficientsOfEachGroupSumToZeroAndAreNoOthers) {
  const std::vector<std::vector<int>> groups = {{0, 2, 7}, {1, 4}, {3}, {5, 6, 8, 9}};
  std::set<std::uint64_t> all;
  for (const std::vector<int>& members : groups) {
    std::uint64_t sum = 0;
    for (const int rank : members) {
      const std::uint64_t coefficient = agreement_coefficient(rank, members);
      sum += coefficient;
      EXPECT_TRUE(all.insert(coefficient).second) << rank;
      EXPECT_EQ(coefficient == 0, members.size() == 1) << rank;
    }
    EXPECT_EQ(sum, 0u);
  }
  EXPECT_EQ(agreement_coefficient(0, std::vector{0, 1, 2}), agreement_coefficient(0, 3));
}

}  // namespace
}  // namespace holdfast
