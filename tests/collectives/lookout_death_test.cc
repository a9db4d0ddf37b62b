// Ranks that die, and who speaks when rank 0 is the one that does.
#include <gtest/gtest.h>

#include "collectives/lookout_world.h"

namespace holdfast {

namespace {

using Move = Lookout::Move;
constexpr int kDeputy = 1;

TEST(LookoutDeath, AClosedConnectionIsADeathWithoutAnySuspicion) {
  LookoutWorld world(4, 0);
  world.rank(2).place = {1, 18, 2, Phase::kBegin};
  world.answer(2);
  world.silence(2);
  world.lookout().closed(2);
  EXPECT_EQ(world.run(), kAskAndLeave);
  const Departure& departure = world.lookout().departure();
  EXPECT_EQ(missing_text(departure), "2 died");
  EXPECT_EQ(departure.missing[0].last_seen->attempt, 18u);
  EXPECT_EQ(survivors_of(departure), (Ranks{0, 1, 3}));
  EXPECT_EQ(departure.survivors[1].place.attempt, kFront.attempt);
}

TEST(LookoutDeath, LeavingWaitsForTheDeathTimeAndNoLonger) {
  LookoutWorld world(3, 0);
  world.lookout().closed(2);
  EXPECT_EQ(world.tick(), Move::kAsk);
  for (std::int64_t i = 1; i < LookoutWorld::kDeathTicks; ++i) EXPECT_EQ(world.tick(), Move::kNothing) << i;
  EXPECT_EQ(world.tick(), Move::kLeave);
}

TEST(LookoutDeath, DeathsCloseTogetherAreReportedTogether) {
  LookoutWorld world(5, 0);
  world.silence(2);
  world.silence(4);
  world.lookout().closed(4);
  ASSERT_EQ(world.tick(), Move::kAsk);
  world.all_answer();
  ASSERT_EQ(world.tick(), Move::kNothing);
  world.lookout().closed(2);
  EXPECT_EQ(world.run(), Moves{Move::kLeave});
  EXPECT_EQ(missing_text(world.lookout().departure()), "2 died, 4 died");
  EXPECT_EQ(survivors_of(world.lookout().departure()), (Ranks{0, 1, 3}));
}

TEST(LookoutDeath, ADeathDuringAnInquiryEndsItSooner) {
  LookoutWorld world(4, 0);
  world.silence(3);
  world.lookout().suspect();
  ASSERT_EQ(world.tick(), Move::kAsk);
  world.all_answer();
  ASSERT_EQ(world.tick(), Move::kNothing);
  world.lookout().closed(3);
  EXPECT_EQ(world.run(static_cast<int>(LookoutWorld::kDeathTicks) + 1), kAskAndLeave);
  EXPECT_EQ(missing_text(world.lookout().departure()), "3 died");
  EXPECT_EQ(survivors_of(world.lookout().departure()), (Ranks{0, 1, 2}));
}

// They wait for the dead one, whatever they look like.
TEST(LookoutDeath, NobodyIsCalledStuckBesideADeadRank) {
  LookoutWorld world(4, 0);
  world.rank(1) = {kBehind, false, 4};
  world.rank(0) = {kBehind, false, 4};
  world.lookout().closed(3);
  world.silence(3);
  EXPECT_EQ(world.run(), kAskAndLeave);
  EXPECT_EQ(missing_text(world.lookout().departure()), "3 died");
  EXPECT_EQ(survivors_of(world.lookout().departure()), (Ranks{0, 1, 2}));
}

TEST(LookoutDeath, APauseExcusesNoDeath) {
  LookoutWorld world(3, 0);
  world.everybody({kFront, true, 0});
  world.lookout().closed(1);
  world.silence(1);
  EXPECT_EQ(world.run(), kAskAndLeave);
  EXPECT_EQ(missing_text(world.lookout().departure()), "1 died");
}

TEST(LookoutDeath, AConnectionThatClosesAfterGoodbyeIsNoDeath) {
  LookoutWorld world(3, 0);
  for (const int r : {1, 2}) {
    world.lookout().goodbye(r);
    world.lookout().closed(r);
  }
  EXPECT_EQ(world.run(1000), Moves());
}

TEST(LookoutDeath, WhoSaidGoodbyeIsNotBlamedForAnothersDeath) {
  LookoutWorld world(4, 0);
  world.lookout().goodbye(1);
  world.lookout().closed(1);
  world.silence(1);
  world.lookout().closed(3);
  world.silence(3);
  EXPECT_EQ(world.run(), kAskAndLeave);
  EXPECT_EQ(missing_text(world.lookout().departure()), "3 died");
  EXPECT_EQ(survivors_of(world.lookout().departure()), (Ranks{0, 2}));
}

// ---- the deputy

TEST(LookoutDeputy, SaysNothingWhileRank0AnswersWhoeverIsMissing) {
  LookoutWorld world(4, kDeputy, 0);
  world.silence(3);
  world.rank(2) = {kBehind, false, 7};
  for (int i = 0; i < 20; ++i) EXPECT_EQ(world.inquire(), kAskOnly);
  world.lookout().closed(3);
  for (int i = 0; i < 20; ++i) EXPECT_EQ(world.inquire(), kAskOnly);
}

TEST(LookoutDeputy, DoesNotWarnInRank0sPlace) {
  LookoutWorld world(3, kDeputy, 0);
  world.everybody({kFront, false, 5});
  EXPECT_EQ(world.inquire(), kAskOnly);
}

TEST(LookoutDeputy, SpeaksWhenRank0DoesNotAnswer) {
  LookoutWorld world(4, kDeputy, 0);
  world.silence(0);
  EXPECT_EQ(world.inquire(), kAskAndLeave);
  const Departure& departure = world.lookout().departure();
  EXPECT_EQ(missing_text(departure), "0 silent");
  EXPECT_EQ(survivors_of(departure), (Ranks{1, 2, 3}));
  EXPECT_EQ(departure.reported_by, kDeputy);
}

TEST(LookoutDeputy, SpeaksWhenRank0Died) {
  LookoutWorld world(4, kDeputy, 0);
  world.lookout().closed(0);
  world.silence(0);
  EXPECT_EQ(world.run(), kAskAndLeave);
  EXPECT_EQ(missing_text(world.lookout().departure()), "0 died");
  EXPECT_EQ(survivors_of(world.lookout().departure()), (Ranks{1, 2, 3}));
}

TEST(LookoutDeputy, SpeaksWhenRank0IsDoneAndOthersAreMissing) {
  LookoutWorld world(4, kDeputy, 0);
  world.lookout().goodbye(0);
  world.silence(0);
  world.silence(3);
  EXPECT_EQ(world.inquire(), kAskAndLeave);
  EXPECT_EQ(missing_text(world.lookout().departure()), "0 left, 3 silent");
}

TEST(LookoutDeputy, ADeathThatRank0DiedBeforeReportingIsNotLost) {
  LookoutWorld world(5, kDeputy, 0);
  world.lookout().closed(3);
  world.silence(3);
  EXPECT_EQ(world.run(), Moves());  // rank 0's business
  world.lookout().closed(0);
  world.silence(0);
  EXPECT_EQ(world.run(), kAskAndLeave);
  EXPECT_EQ(missing_text(world.lookout().departure()), "0 died, 3 died");
  EXPECT_EQ(survivors_of(world.lookout().departure()), (Ranks{1, 2, 4}));
}

TEST(LookoutDeputy, ADeathThatAStoppedRank0CannotReportIsReportedWithRank0AsSilent) {
  LookoutWorld world(5, kDeputy, 0);
  world.lookout().closed(3);
  world.silence(3);
  world.silence(0);
  EXPECT_EQ(world.inquire(), kAskAndLeave);
  EXPECT_EQ(missing_text(world.lookout().departure()), "0 silent, 3 died");
  EXPECT_EQ(survivors_of(world.lookout().departure()), (Ranks{1, 2, 4}));
}

}  // namespace
}  // namespace holdfast
