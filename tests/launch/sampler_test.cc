#include "train/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <numeric>
#include <set>

namespace holdfast::train {
namespace {

using Ids = std::vector<std::int64_t>;

Ids draw(Sampler& sampler, std::uint64_t attempt, int micro) {
  Ids ids;
  sampler.batch(attempt, micro, &ids);
  return ids;
}

// All samples that `rank` sees in attempts [0, attempts), in order.
Ids draw_all(Sampler& sampler, std::uint64_t attempts, int micro_batches) {
  Ids all;
  for (std::uint64_t attempt = 0; attempt < attempts; ++attempt) {
    for (int micro = 0; micro < micro_batches; ++micro) {
      const Ids ids = draw(sampler, attempt, micro);
      all.insert(all.end(), ids.begin(), ids.end());
    }
  }
  return all;
}

TEST(Sampler, OnePassOverAllRanksSeesEachSampleOnce) {
  Ids seen;
  for (int rank = 0; rank < 3; ++rank) {
    Sampler sampler(7, 60, rank, 3, 5, 2);  // 20 samples each: 2 attempts of 2 x 5
    const Ids own = draw_all(sampler, 2, 2);
    seen.insert(seen.end(), own.begin(), own.end());
  }
  std::sort(seen.begin(), seen.end());
  Ids everything(60);
  std::iota(everything.begin(), everything.end(), 0);
  EXPECT_EQ(seen, everything);
}

TEST(Sampler, RanksNeverShareASampleWithinAPassWhenTheRemainderIsLeftOut) {
  for (std::uint64_t pass = 0; pass < 3; ++pass) {
    std::set<std::int64_t> seen;
    for (int rank = 0; rank < 4; ++rank) {
      Sampler sampler(7, 23, rank, 4, 5, 1);  // shards of 5: one attempt is one pass
      for (const std::int64_t id : draw(sampler, pass, 0)) {
        EXPECT_TRUE(seen.insert(id).second) << "pass " << pass << " sample " << id;
        EXPECT_GE(id, 0);
        EXPECT_LT(id, 23);
      }
    }
    EXPECT_EQ(seen.size(), 20u);
  }
}

TEST(Sampler, ASkippedOrRepeatedAttemptShiftsNothing) {
  Sampler in_order(3, 1000, 1, 4, 32, 2);
  std::vector<Ids> expected;
  for (std::uint64_t attempt = 0; attempt < 20; ++attempt) {
    for (int micro = 0; micro < 2; ++micro) expected.push_back(draw(in_order, attempt, micro));
  }
  Sampler backwards(3, 1000, 1, 4, 32, 2);
  for (std::uint64_t attempt = 20; attempt-- > 0;) {
    for (int micro = 2; micro-- > 0;) {
      EXPECT_EQ(draw(backwards, attempt, micro), expected[attempt * 2 + static_cast<std::uint64_t>(micro)]);
    }
  }
  Sampler fresh(3, 1000, 1, 4, 32, 2);
  EXPECT_EQ(draw(fresh, 13, 1), expected[27]);
  EXPECT_EQ(draw(fresh, 13, 1), expected[27]);
}

TEST(Sampler, ABatchThatReachesTheEndOfAPassGoesOnInTheNext) {
  Sampler fours(9, 10, 0, 1, 4, 1);
  Sampler tens(9, 10, 0, 1, 10, 1);
  EXPECT_EQ(draw_all(fours, 5, 1), draw_all(tens, 2, 1));
}

TEST(Sampler, ABatchLargerThanAShardSpansSeveralPasses) {
  Sampler large(9, 3, 0, 1, 7, 1);
  Sampler ones(9, 3, 0, 1, 1, 1);
  EXPECT_EQ(draw(large, 0, 0), draw_all(ones, 7, 1));
}

TEST(Sampler, MicroBatchesSplitWhatOneLargeBatchWouldTake) {
  Sampler split(5, 100, 1, 2, 4, 3);
  Sampler whole(5, 100, 1, 2, 12, 1);
  EXPECT_EQ(draw_all(split, 6, 3), draw_all(whole, 6, 1));
}

TEST(Sampler, PassesAndSeedsGiveOtherPermutations) {
  Sampler sampler(1, 1000, 0, 1, 1000, 1);
  Sampler other(2, 1000, 0, 1, 1000, 1);
  Ids identity(1000);
  std::iota(identity.begin(), identity.end(), 0);
  const Ids first = draw(sampler, 0, 0);
  EXPECT_NE(first, identity);
  EXPECT_NE(first, draw(sampler, 1, 0));
  EXPECT_NE(first, draw(other, 0, 0));
}

TEST(Sampler, EachSampleIsAsLikelyInEachPlace) {
  // 2000 permutations of 5: each of 25 (sample, place) pairs is expected 400 times, standard deviation 18.
  int seen[5][5] = {};
  for (std::uint64_t seed = 0; seed < 2000; ++seed) {
    Sampler sampler(seed, 5, 0, 1, 5, 1);
    const Ids ids = draw(sampler, 0, 0);
    for (std::size_t place = 0; place < 5; ++place) ++seen[ids[place]][place];
  }
  for (const auto& places : seen) {
    for (const int count : places) EXPECT_NEAR(count, 400, 100);
  }
}

// A run that is replayed on another machine, or by a later build, must see the same samples.
TEST(Sampler, IsTheSameInEveryBuild) {
  Sampler sampler(42, 60000, 2, 4, 4, 2);
  EXPECT_EQ(draw(sampler, 4000, 1), (Ids{44489, 51457, 18536, 19097}));
  EXPECT_EQ(rng_key(42, 2, 1000, 1), 0xbc3625d342d18baeu);
}

TEST(RngKey, IsDistinctForEachRankAttemptAndMicroBatch) {
  std::set<std::uint64_t> keys;
  std::size_t asked = 0;
  for (std::uint64_t seed = 0; seed < 3; ++seed) {
    for (int rank = 0; rank < 8; ++rank) {
      for (std::uint64_t attempt = 0; attempt < 200; ++attempt) {
        for (int micro = 0; micro < 4; ++micro, ++asked) keys.insert(rng_key(seed, rank, attempt, micro));
      }
    }
  }
  EXPECT_EQ(keys.size(), asked);
}

TEST(RngKey, ANeighbourDiffersInAboutHalfOfTheBits) {
  int flipped = 0;
  for (std::uint64_t attempt = 0; attempt < 1000; ++attempt) {
    const std::uint64_t key = rng_key(1, 0, attempt, 0);
    flipped += std::popcount(key ^ rng_key(1, 0, attempt + 1, 0));
    flipped += std::popcount(key ^ rng_key(1, 1, attempt, 0));
    flipped += std::popcount(key ^ rng_key(1, 0, attempt, 1));
    flipped += std::popcount(key ^ rng_key(2, 0, attempt, 0));
  }
  EXPECT_NEAR(flipped / 4000.0, 32.0, 0.5);
}

TEST(CheckSampler, RefusesWhatCannotBeSampled) {
  EXPECT_TRUE(check_sampler(4, 4, 1, 1).ok());
  EXPECT_TRUE(check_sampler(4, 1, 100, 1).ok());
  EXPECT_EQ(check_sampler(3, 4, 1, 1).code(), StatusCode::kUsage);
  EXPECT_NE(check_sampler(3, 4, 1, 1).message().find("3 samples is too small for 4 ranks"),
            std::string::npos);
  EXPECT_EQ(check_sampler(0, 1, 1, 1).code(), StatusCode::kUsage);
  EXPECT_EQ(check_sampler(4, 0, 1, 1).code(), StatusCode::kUsage);
  EXPECT_EQ(check_sampler(4, 1, 0, 1).message(), "batch: 0, must be at least 1");
  EXPECT_EQ(check_sampler(4, 1, 1, -2).message(), "micro-batches: -2, must be at least 1");
}

}  // namespace
}  // namespace holdfast::train
