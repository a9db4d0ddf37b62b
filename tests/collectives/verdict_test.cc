#include "holdfast/collectives/verdict.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace holdfast {
namespace {

using Kind = Verdict::Kind;

// What rank r of `world_size` ranks sends when nothing is wrong.
Record healthy(int rank, int world_size, const Agreement& agreement = {1, 7, 42}) {
  Record record;
  record.set_participant(agreement_coefficient(rank, world_size) * agreement_hash(agreement));
  return record;
}

Record clean_sum(int world_size) {
  Record sum;
  for (int r = 0; r < world_size; ++r) sum += healthy(r, world_size);
  return sum;
}

// A clean sum of four ranks to which one rank added `edit`.
template <typename Edit>
Verdict judge_with(Edit&& edit) {
  Record extra;
  edit(extra);
  Record sum = clean_sum(4);
  sum += extra;
  return judge(sum, 4);
}

TEST(Verdict, IsCleanOnlyWithEveryRankThereAndNothingSaid) {
  for (const int n : {1, 2, 3, 4, 64, 4096}) {
    const Verdict verdict = judge(clean_sum(n), n);
    EXPECT_EQ(verdict.kind, Kind::kClean) << n;
    EXPECT_TRUE(verdict.clean());
    EXPECT_EQ(verdict.sum, clean_sum(n));
    EXPECT_FALSE(verdict.earliest_stage);
    EXPECT_FALSE(verdict.only_bad_rank);
    EXPECT_FALSE(verdict.last_attempt_with_data);
  }
}

TEST(Verdict, IsNotCleanWhenNothingWasReduced) {
  EXPECT_EQ(judge(Record(), 1).kind, Kind::kMissing);
  EXPECT_EQ(judge(Record(), 4).kind, Kind::kMissing);
  EXPECT_FALSE(Verdict().clean());
}

TEST(Verdict, AnyLaneMakesItNotCleanButThoseThatSayNothingBad) {
  for (std::size_t lane = 0; lane < Record::kLanes; ++lane) {
    const bool announces_end = lane == 24;
    const bool names_bad_rank = lane == 28;  // means something only beside lane 27
    for (const std::uint64_t value : {std::uint64_t{1}, std::uint64_t{1} << 63, ~std::uint64_t{0}}) {
      Record sum = clean_sum(4);
      sum.lanes()[lane] += value;
      const bool tells_of_a_part = lane == 29 && value == 1;
      EXPECT_EQ(judge(sum, 4).clean(), announces_end || names_bad_rank || tells_of_a_part)
          << "lane " << lane << " + " << value;
    }
  }
}

TEST(Verdict, OneBadValueOfAnyStageAndClassIsSeen) {
  for (int s = 0; s < kStageCount; ++s) {
    for (const BadCounts& counts : {BadCounts{1, 0, 0}, BadCounts{0, 1, 0}, BadCounts{0, 0, 1}}) {
      const Verdict verdict = judge_with([&](Record& r) { r.add_bad(static_cast<Stage>(s), counts); });
      EXPECT_EQ(verdict.kind, Kind::kNonFinite);
      EXPECT_EQ(verdict.earliest_stage, static_cast<Stage>(s));
    }
  }
}

TEST(Verdict, CountsThatCancelInTheirTotalAreStillSeen) {
  Record sum = clean_sum(4);
  sum.lanes()[9] = std::uint64_t{1} << 63;
  sum.lanes()[10] = std::uint64_t{1} << 63;
  EXPECT_EQ(judge(sum, 4).kind, Kind::kNonFinite);
  EXPECT_EQ(judge(sum, 4).earliest_stage, Stage::kBackward);
}

TEST(Verdict, NamesTheEarliestStageOfAll) {
  const Verdict verdict = judge_with([](Record& r) {
    r.add_bad(Stage::kOptimizer, {0, 9, 0});
    r.add_bad(Stage::kBackward, {500, 0, 0});
    r.add_bad(Stage::kLoss, {0, 0, 1});
  });
  EXPECT_EQ(verdict.earliest_stage, Stage::kLoss);
}

TEST(Verdict, EachFlagHasItsKind) {
  EXPECT_EQ(judge_with([](Record& r) { r.set_error(); }).kind, Kind::kError);
  EXPECT_EQ(judge_with([](Record& r) { r.set_update_failed(); }).kind, Kind::kUpdateFailed);
  for (int request = 0; request < kRequestCount; ++request) {
    EXPECT_EQ(judge_with([&](Record& r) { r.set_request(static_cast<Request>(request)); }).kind,
              Kind::kRequested);
  }
  EXPECT_EQ(judge_with([](Record& r) { r.mark_bad(2); }).kind, Kind::kNonFinite);
}

TEST(Verdict, TheWorstOfSeveralWins) {
  // From the least to the worst; each step adds to what is there already.
  Record sum = clean_sum(4);
  sum.set_request(Request::kStop);
  EXPECT_EQ(judge(sum, 4).kind, Kind::kRequested);
  sum.add_bad(Stage::kLoss, {1, 0, 0});
  EXPECT_EQ(judge(sum, 4).kind, Kind::kNonFinite);
  sum.set_error();
  EXPECT_EQ(judge(sum, 4).kind, Kind::kError);
  sum.set_replica_proof(5);
  EXPECT_EQ(judge(sum, 4).kind, Kind::kDiverged);
  sum.set_update_failed();
  EXPECT_EQ(judge(sum, 4).kind, Kind::kUpdateFailed);
  sum.lanes()[26] += 1;
  EXPECT_EQ(judge(sum, 4).kind, Kind::kDisagree);
  sum.lanes()[25] -= 1;
  EXPECT_EQ(judge(sum, 4).kind, Kind::kMissing);
  EXPECT_EQ(judge(sum, 4).earliest_stage, Stage::kLoss);
}

TEST(Verdict, AMissingOrAnExtraParticipantIsNeverClean) {
  for (const int n : {1, 2, 4, 64}) {
    for (int absent = 0; absent < n; ++absent) {
      Record sum;
      for (int r = 0; r < n; ++r) {
        if (r != absent) sum += healthy(r, n);
      }
      EXPECT_EQ(judge(sum, n).kind, Kind::kMissing) << n << " ranks without " << absent;
    }
    Record sum = clean_sum(n);
    sum += healthy(0, n);
    EXPECT_EQ(judge(sum, n).kind, Kind::kMissing) << n << " ranks and one more";
    EXPECT_EQ(judge(clean_sum(n), n + 1).kind, Kind::kMissing);
  }
}

TEST(Verdict, RanksAtDifferentAttemptsEpochsOrPoliciesDisagree) {
  for (const Agreement& other : {Agreement{1, 8, 42}, Agreement{2, 7, 42}, Agreement{1, 7, 43}}) {
    for (int odd = 0; odd < 4; ++odd) {
      Record sum;
      for (int r = 0; r < 4; ++r) sum += healthy(r, 4, r == odd ? other : Agreement{1, 7, 42});
      EXPECT_EQ(judge(sum, 4).kind, Kind::kDisagree);
    }
  }
}

TEST(Verdict, TheSameAttemptNumberInAnotherEpochIsDisagreement) {
  Record sum;
  for (int r = 0; r < 4; ++r) sum += healthy(r, 4, {r < 2 ? 1u : 2u, 7, 42});
  EXPECT_EQ(judge(sum, 4).kind, Kind::kDisagree);
}

TEST(Verdict, PartsAreDoneWhenEveryRankSaysSo) {
  for (std::uint64_t done = 0; done <= 4; ++done) {
    Record sum = clean_sum(4);
    sum.lanes()[29] = done;
    EXPECT_TRUE(judge(sum, 4).clean());
    EXPECT_EQ(judge(sum, 4).parts_done, done == 4);
  }
}

TEST(Verdict, ReplicasOfDifferentDigestsHaveDiverged) {
  for (int odd = 0; odd < 4; ++odd) {
    Record sum;
    for (int r = 0; r < 4; ++r) {
      Record record = healthy(r, 4);
      record.set_replica_proof(agreement_coefficient(r, 4) * (r == odd ? 0x1234567u : 0x7654321u));
      sum += record;
    }
    EXPECT_EQ(judge(sum, 4).kind, Kind::kDiverged) << odd;
  }
  Record equal;
  for (int r = 0; r < 4; ++r) {
    Record record = healthy(r, 4);
    record.set_replica_proof(agreement_coefficient(r, 4) * 0x7654321u);
    equal += record;
  }
  EXPECT_TRUE(judge(equal, 4).clean());
}

TEST(Verdict, LanesOfALaterVersionFailClosed) {
  for (std::size_t lane = 31; lane < Record::kLanes; ++lane) {
    Record sum = clean_sum(4);
    sum.lanes()[lane] = 1;
    EXPECT_EQ(judge(sum, 4).kind, Kind::kDisagree) << lane;
  }
}

TEST(Verdict, NamesTheOnlyBadRankWhicheverItIs) {
  for (int rank = 0; rank < 4; ++rank) {
    const Verdict verdict = judge_with([&](Record& r) {
      r.add_bad(Stage::kBackward, {1, 0, 0});
      r.mark_bad(rank);
    });
    EXPECT_EQ(verdict.only_bad_rank, rank);
  }
}

TEST(Verdict, NamesNoRankWhenSeveralAreBadOrTheNumberIsNonsense) {
  Record sum = clean_sum(4);
  for (const int rank : {0, 3}) {
    Record bad;
    bad.add_bad(Stage::kBackward, {1, 0, 0});
    bad.mark_bad(rank);
    sum += bad;
  }
  EXPECT_EQ(judge(sum, 4).sum.bad_ranks(), 2u);
  EXPECT_FALSE(judge(sum, 4).only_bad_rank);

  for (const std::uint64_t nonsense : {std::uint64_t{4}, std::uint64_t{1} << 32, ~std::uint64_t{0}}) {
    Record odd = clean_sum(4);
    odd.lanes()[27] = 1;
    odd.lanes()[28] = nonsense;
    EXPECT_FALSE(judge(odd, 4).only_bad_rank);
  }
}

// Field case 15: an attempt before the data runs out is a good attempt.
TEST(Verdict, AnAnnouncedEndOfDataIsCleanAndPassedOn) {
  const Verdict verdict = judge_with([](Record& r) { r.set_no_next_batch(); });
  EXPECT_TRUE(verdict.clean());
  EXPECT_TRUE(verdict.last_attempt_with_data);

  const Verdict dirty = judge_with([](Record& r) {
    r.set_no_next_batch();
    r.add_bad(Stage::kLoss, {1, 0, 0});
  });
  EXPECT_FALSE(dirty.clean());
  EXPECT_TRUE(dirty.last_attempt_with_data);
}

TEST(Verdict, AWorldOfOneRankIsJudgedAlike) {
  EXPECT_TRUE(judge(clean_sum(1), 1).clean());
  Record sum = clean_sum(1);
  sum.add_bad(Stage::kInput, {0, 1, 0});
  sum.mark_bad(0);
  EXPECT_EQ(judge(sum, 1).kind, Kind::kNonFinite);
  EXPECT_EQ(judge(sum, 1).only_bad_rank, 0);
}

}  // namespace
}  // namespace holdfast
