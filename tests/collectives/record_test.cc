#include "holdfast/collectives/record.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string_view>
#include <vector>

namespace holdfast {
namespace {

// The lanes that are not zero, and what they hold.
using Lanes = std::vector<std::pair<std::size_t, std::uint64_t>>;
Lanes nonzero(const Record& record) {
  Lanes lanes;
  for (std::size_t i = 0; i < Record::kLanes; ++i) {
    if (record.lanes()[i] != 0) lanes.push_back({i, record.lanes()[i]});
  }
  return lanes;
}

Record random_record(std::mt19937_64& random) {
  Record record;
  for (std::uint64_t& lane : record.lanes()) lane = random();
  return record;
}

TEST(Record, StartsAsZerosAndFits256Bytes) {
  EXPECT_EQ(nonzero(Record()), Lanes());
  EXPECT_EQ(sizeof(Record), 256u);
}

// Ranks of different builds share these positions; they never move.
TEST(Record, BadCountsHaveTheLaneStageTimesThreePlusClass) {
  for (int stage = 0; stage < kStageCount; ++stage) {
    Record record;
    record.add_bad(static_cast<Stage>(stage), {5, 6, 7});
    const auto first = static_cast<std::size_t>(stage) * 3;
    EXPECT_EQ(nonzero(record), (Lanes{{first, 5}, {first + 1, 6}, {first + 2, 7}})) << stage;
    EXPECT_EQ(record.bad(static_cast<Stage>(stage)), (BadCounts{5, 6, 7}));
    EXPECT_EQ(record.bad(static_cast<Stage>(stage), ValueClass::kNan), 5u);
    EXPECT_EQ(record.bad(static_cast<Stage>(stage), ValueClass::kPosInf), 6u);
    EXPECT_EQ(record.bad(static_cast<Stage>(stage), ValueClass::kNegInf), 7u);
  }
}

TEST(Record, StagesAreInTheOrderInWhichAnAttemptRuns) {
  const std::vector<std::string_view> names = {"input",    "forward",   "loss",
                                               "backward", "reduction", "optimizer"};
  for (std::size_t i = 0; i < names.size(); ++i) {
    EXPECT_EQ(stage_name(static_cast<Stage>(i)), names[i]);
    Stage parsed = Stage::kInput;
    EXPECT_TRUE(parse_stage(names[i], &parsed));
    EXPECT_EQ(parsed, static_cast<Stage>(i));
  }
  Stage untouched = Stage::kLoss;
  EXPECT_FALSE(parse_stage("Backward", &untouched));
  EXPECT_FALSE(parse_stage("", &untouched));
  EXPECT_EQ(untouched, Stage::kLoss);
}

TEST(Record, EachFlagHasItsOwnDocumentedLane) {
  Record error;
  error.set_error();
  EXPECT_EQ(nonzero(error), (Lanes{{18, 1}}));
  EXPECT_EQ(error.errors(), 1u);

  Record failed;
  failed.set_update_failed();
  EXPECT_EQ(nonzero(failed), (Lanes{{19, 1}}));
  EXPECT_EQ(failed.updates_failed(), 1u);

  for (int request = 0; request < kRequestCount; ++request) {
    Record record;
    record.set_request(static_cast<Request>(request));
    EXPECT_EQ(nonzero(record), (Lanes{{20 + static_cast<std::size_t>(request), 1}}));
    EXPECT_EQ(record.requests(static_cast<Request>(request)), 1u);
  }

  Record dry;
  dry.set_no_next_batch();
  EXPECT_EQ(nonzero(dry), (Lanes{{24, 1}}));
  EXPECT_EQ(dry.no_next_batch(), 1u);

  Record participant;
  participant.set_participant(77);
  EXPECT_EQ(nonzero(participant), (Lanes{{25, 1}, {26, 77}}));
  EXPECT_EQ(participant.participants(), 1u);
  EXPECT_EQ(participant.agreement(), 77u);

  Record bad;
  bad.mark_bad(6);
  EXPECT_EQ(nonzero(bad), (Lanes{{27, 1}, {28, 6}}));
  EXPECT_EQ(bad.bad_ranks(), 1u);
  EXPECT_EQ(bad.bad_rank_sum(), 6u);

  Record done;
  done.set_part_done();
  EXPECT_EQ(nonzero(done), (Lanes{{29, 1}}));
  EXPECT_EQ(done.parts_done(), 1u);

  Record proof;
  proof.set_replica_proof(99);
  EXPECT_EQ(nonzero(proof), (Lanes{{30, 99}}));
  EXPECT_EQ(proof.replica_proof(), 99u);
}

TEST(Record, FlagsSaidTwiceCountOnce) {
  Record record;
  for (int i = 0; i < 2; ++i) {
    record.set_error();
    record.set_update_failed();
    record.set_request(Request::kStop);
    record.set_no_next_batch();
    record.set_participant(1);
    record.mark_bad(3);
  }
  EXPECT_EQ(nonzero(record), (Lanes{{18, 1}, {19, 1}, {20, 1}, {24, 1}, {25, 1}, {26, 1}, {27, 1}, {28, 3}}));
}

TEST(Record, EachReservedLaneIsSeen) {
  EXPECT_TRUE(Record().reserved_is_zero());
  for (std::size_t lane = 0; lane < Record::kLanes; ++lane) {
    Record record;
    record.lanes()[lane] = 1;
    EXPECT_EQ(record.reserved_is_zero(), lane < 31) << lane;
  }
}

TEST(Record, CountsOfOneRankAddUpOverItsTensors) {
  Record record;
  record.add_bad(Stage::kBackward, {1, 2, 3});
  record.add_bad(Stage::kBackward, {10, 20, 30});
  EXPECT_EQ(record.bad(Stage::kBackward), (BadCounts{11, 22, 33}));
}

TEST(Record, CountsOfOneRankSaturateInsteadOfWrapping) {
  constexpr std::uint64_t kMax = Record::kMaxPerRank;
  EXPECT_EQ(kMax, (std::uint64_t{1} << 44) - 1);
  Record record;
  record.add_bad(Stage::kInput, {kMax - 1, kMax, ~std::uint64_t{0}});
  EXPECT_EQ(record.bad(Stage::kInput), (BadCounts{kMax - 1, kMax, kMax}));
  record.add_bad(Stage::kInput, {2, 1, ~std::uint64_t{0}});
  EXPECT_EQ(record.bad(Stage::kInput), (BadCounts{kMax, kMax, kMax}));
}

TEST(Record, AMillionSaturatedRanksDoNotWrapToZero) {
  Record sum;
  sum.add_bad(Stage::kBackward, {Record::kMaxPerRank, 0, 0});
  for (int doubling = 0; doubling < 20; ++doubling) sum += Record(sum);
  EXPECT_EQ(sum.bad(Stage::kBackward, ValueClass::kNan), Record::kMaxPerRank << 20);
}

// Field case 4.
TEST(Record, FourRanksWithMoreThan31BitsOfBadValuesGiveTheTrueTotal) {
  Record rank;
  rank.add_bad(Stage::kBackward, {2147483646, 0, 0});
  Record sum;
  for (int r = 0; r < 4; ++r) sum += rank;
  EXPECT_EQ(sum.bad(Stage::kBackward).total(), 8589934584u);
}

TEST(Record, MergesLaneByLaneMod2To64) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 100; ++round) {
    const Record a = random_record(random);
    const Record b = random_record(random);
    Record sum = a;
    sum += b;
    for (std::size_t i = 0; i < Record::kLanes; ++i) EXPECT_EQ(sum.lanes()[i], a.lanes()[i] + b.lanes()[i]);
  }
  Record wrapped;
  wrapped.lanes()[0] = ~std::uint64_t{0};
  Record one;
  one.lanes()[0] = 1;
  EXPECT_EQ(wrapped += one, Record());
}

TEST(Record, AnyOrderAndAnyGroupingOfMergesGivesTheSameBits) {
  std::mt19937_64 random(2);
  std::vector<Record> ranks;
  for (int r = 0; r < 8; ++r) ranks.push_back(random_record(random));
  Record in_order;
  for (const Record& rank : ranks) in_order += rank;

  for (int round = 0; round < 50; ++round) {
    std::vector<Record> parts = ranks;
    while (parts.size() > 1) {  // a random tree
      std::shuffle(parts.begin(), parts.end(), random);
      parts[parts.size() - 2] += parts.back();
      parts.pop_back();
    }
    EXPECT_EQ(parts.front(), in_order);
  }
}

TEST(BadCounts, AddByClass) {
  BadCounts counts = {1, 2, 3};
  counts += {10, 20, 30};
  EXPECT_EQ(counts, (BadCounts{11, 22, 33}));
  EXPECT_EQ(counts.total(), 66u);
}

}  // namespace
}  // namespace holdfast
