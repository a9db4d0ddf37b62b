#include "holdfast/collectives/progress_board.h"

#include <gtest/gtest.h>

namespace holdfast {
namespace {

TEST(ProgressBoard, StartsOutsideOfTheFirstAttempt) {
  const ProgressBoard board;
  EXPECT_EQ(board.place().epoch, 0u);
  EXPECT_EQ(board.place().attempt, 0u);
  EXPECT_EQ(board.place().phase, Phase::kOutside);
  EXPECT_EQ(board.beats(), 0u);
  EXPECT_FALSE(board.paused());
}

TEST(ProgressBoard, EachCallIsABeatAndAStepOfItsAttempt) {
  ProgressBoard board;
  board.enter(3, 7, Phase::kBegin);
  EXPECT_EQ(board.place().step, 0u);
  board.enter(3, 7, Phase::kObserve);
  board.enter(3, 7, Phase::kObserve);
  EXPECT_EQ(board.place().epoch, 3u);
  EXPECT_EQ(board.place().attempt, 7u);
  EXPECT_EQ(board.place().step, 2u);
  EXPECT_EQ(board.place().phase, Phase::kObserve);
  EXPECT_EQ(board.beats(), 3u);

  board.enter(3, 8, Phase::kBegin);
  EXPECT_EQ(board.place().step, 0u);
  board.enter(4, 8, Phase::kBegin);  // the attempt again, after a restore
  EXPECT_EQ(board.place().step, 0u);
  EXPECT_EQ(board.beats(), 5u);
}

// A rank that has failed observes nothing, and comes to the same meetings.
TEST(ProgressBoard, WhoWaitsForOthersIsAtTheirPlaceWhateverItObservedBefore) {
  ProgressBoard healthy, failed, hangs;
  for (ProgressBoard* board : {&healthy, &failed, &hangs}) board->enter(1, 7, Phase::kBegin);
  for (int tensor = 0; tensor < 5; ++tensor) {
    healthy.enter(1, 7, Phase::kObserve);
    hangs.enter(1, 7, Phase::kObserve);
  }
  EXPECT_TRUE(failed.place().behind(hangs.place()));
  for (const Phase phase : {Phase::kReduce, Phase::kDecide, Phase::kDecide, Phase::kUpdate}) {
    healthy.enter(1, 7, phase);
    failed.enter(1, 7, phase);
    EXPECT_FALSE(failed.place().behind(healthy.place()));
    EXPECT_FALSE(healthy.place().behind(failed.place()));
    EXPECT_TRUE(hangs.place().behind(failed.place()));
  }
}

TEST(ProgressBoard, AnyNumberOfObservationsIsNoMeeting) {
  ProgressBoard board, other;
  board.enter(1, 7, Phase::kBegin);
  other.enter(1, 7, Phase::kBegin);
  for (std::uint32_t i = 0; i < Place::kMeeting + 5; ++i) board.enter(1, 7, Phase::kObserve);
  other.enter(1, 7, Phase::kReduce);
  EXPECT_TRUE(board.place().behind(other.place()));
}

TEST(ProgressBoard, PausesNest) {
  ProgressBoard board;
  board.pause();
  board.pause();
  board.resume();
  EXPECT_TRUE(board.paused());
  board.resume();
  EXPECT_FALSE(board.paused());
}

TEST(Place, EpochThenAttemptThenStepSayWhoIsBehindAndThePhaseDoesNot) {
  const Place place{2, 5, 3, Phase::kObserve};
  for (const Place& ahead :
       {Place{3, 0, 0, Phase::kOutside}, Place{2, 6, 0, Phase::kOutside}, Place{2, 5, 4, Phase::kOutside}}) {
    EXPECT_TRUE(place.behind(ahead));
    EXPECT_FALSE(ahead.behind(place));
  }
  const Place same{2, 5, 3, Phase::kUpdate};
  EXPECT_FALSE(place.behind(same));
  EXPECT_FALSE(same.behind(place));
}

TEST(Phase, HasAName) {
  EXPECT_EQ(phase_name(Phase::kOutside), "outside");
  EXPECT_EQ(phase_name(Phase::kBegin), "begin");
  EXPECT_EQ(phase_name(Phase::kObserve), "observe");
  EXPECT_EQ(phase_name(Phase::kReduce), "reduce");
  EXPECT_EQ(phase_name(Phase::kDecide), "decide");
  EXPECT_EQ(phase_name(Phase::kUpdate), "update");
}

}  // namespace
}  // namespace holdfast
