#include "lookout.h"

#include <gtest/gtest.h>

#include "collectives/lookout_world.h"

namespace holdfast {

namespace {

using Move = Lookout::Move;

TEST(Lookout, WithoutSuspicionNobodyIsAsked) {
  LookoutWorld world(4, 0);
  world.rank(2) = {kBehind, false, 50};
  world.silence(3);
  EXPECT_EQ(world.run(1000), Moves());
}

TEST(Lookout, ARankThatDoesNotAnswerIsSilentWithItsLastPlace) {
  LookoutWorld world(4, 0);
  world.rank(2).place = {1, 19, 7, Phase::kUpdate};
  world.answer(2);  // an earlier report
  world.rank(2).place = {1, 20, 0, Phase::kBegin};
  world.silence(2);
  EXPECT_EQ(world.inquire(), kAskAndLeave);
  const Departure& departure = world.lookout().departure();
  EXPECT_EQ(missing_text(departure), "2 silent");
  EXPECT_EQ(survivors_of(departure), (Ranks{0, 1, 3}));
  EXPECT_EQ(departure.reported_by, 0);
  EXPECT_FALSE(departure.alone);
  EXPECT_EQ(departure.missing[0].who.host, "node2");
  EXPECT_EQ(departure.missing[0].who.pid, 1002);
  ASSERT_TRUE(departure.missing[0].last_seen);
  EXPECT_EQ(departure.missing[0].last_seen->attempt, 19u);
  EXPECT_EQ(departure.missing[0].last_seen->phase, Phase::kUpdate);
}

TEST(Lookout, ASilentRankThatNeverReportedHasNoLastPlace) {
  LookoutWorld world(3, 0);
  world.silence(1);
  EXPECT_EQ(world.inquire(), kAskAndLeave);
  EXPECT_EQ(missing_text(world.lookout().departure()), "1 silent");
  EXPECT_FALSE(world.lookout().departure().missing[0].last_seen);
}

TEST(Lookout, TheInquiryWaitsTheWholeAnswerTimeForASilentRankAndNoLonger) {
  LookoutWorld world(3, 0);
  world.silence(1);
  world.lookout().suspect();
  ASSERT_EQ(world.tick(), Move::kAsk);
  world.all_answer();
  for (std::int64_t i = 1; i < LookoutWorld::kAnswerTicks; ++i) EXPECT_EQ(world.tick(), Move::kNothing) << i;
  EXPECT_EQ(world.tick(), Move::kLeave);
}

TEST(Lookout, AnOverdueRankBehindTheOthersIsStuckAndThoseThatWaitForItSurvive) {
  for (int stuck = 0; stuck < 4; ++stuck) {
    LookoutWorld world(4, 0);
    world.rank(stuck) = {kBehind, false, 1};
    EXPECT_EQ(world.inquire(), kAskAndLeave);
    const Departure& departure = world.lookout().departure();
    EXPECT_EQ(missing_text(departure), std::to_string(stuck) + " stuck");
    Ranks others{0, 1, 2, 3};
    std::erase(others, stuck);
    EXPECT_EQ(survivors_of(departure), others);
    EXPECT_EQ(departure.missing[0].last_seen->step, kBehind.step);
    EXPECT_EQ(departure.missing[0].last_seen->phase, Phase::kObserve);
    EXPECT_EQ(departure.survivors[0].place.step, kFront.step);
  }
}

TEST(Lookout, BehindByAnAttemptOrAnEpochIsBehind) {
  for (const Place& place : {Place{1, 19, 9, Phase::kOutside}, Place{0, 99, 9, Phase::kDecide}}) {
    LookoutWorld world(3, 0);
    world.rank(1).place = place;
    EXPECT_EQ(world.inquire(), kAskAndLeave);
    EXPECT_EQ(missing_text(world.lookout().departure()), "1 stuck");
  }
}

TEST(Lookout, SeveralOfSeveralKindsAreAllNamedInTheOrderOfRanks) {
  LookoutWorld world(6, 0);
  world.rank(5) = {kBehind, false, 1};
  world.silence(4);
  world.lookout().goodbye(2);
  world.silence(2);
  EXPECT_EQ(world.inquire(), kAskAndLeave);
  EXPECT_EQ(missing_text(world.lookout().departure()), "2 left, 4 silent");
  // Rank 5 may be behind because the absent no longer take part in what it waits for.
  EXPECT_EQ(survivors_of(world.lookout().departure()), (Ranks{0, 1, 3, 5}));
}

TEST(Lookout, ARankThatIsMerelySlowIsWaitedFor) {
  LookoutWorld world(4, 0);
  world.rank(3) = {kBehind, false, 0};
  for (int i = 0; i < 100; ++i) EXPECT_EQ(world.inquire(), kAskOnly);
  // Until it is overdue itself.
  world.rank(3).deadlines_missed = 1;
  EXPECT_EQ(world.inquire(), kAskAndLeave);
  EXPECT_EQ(missing_text(world.lookout().departure()), "3 stuck");
}

TEST(Lookout, ASlowRankIsASurvivorWhenAnotherIsMissing) {
  LookoutWorld world(4, 0);
  world.rank(3) = {kBehind, false, 0};
  world.silence(1);
  EXPECT_EQ(world.inquire(), kAskAndLeave);
  EXPECT_EQ(missing_text(world.lookout().departure()), "1 silent");
  EXPECT_EQ(survivors_of(world.lookout().departure()), (Ranks{0, 2, 3}));
}

TEST(Lookout, AllAtOnePlaceIsAWarningUntilEverybodysPatienceIsAtItsEnd) {
  LookoutWorld world(3, 0);
  world.everybody({kFront, false, 0});
  EXPECT_EQ(world.inquire(), kAskOnly);  // moved meanwhile
  world.everybody({kFront, false, 1});
  EXPECT_EQ(world.inquire(), kAskAndWarn);
  world.everybody({kFront, false, 50});
  for (int r = 0; r < 3; ++r) {
    world.rank(r).deadlines_missed = Lookout::kPatience - 1;  // the one that has waited least counts
    EXPECT_EQ(world.inquire(), kAskAndWarn) << r;
    world.rank(r).deadlines_missed = 50;
  }
  world.everybody({kFront, false, Lookout::kPatience});
  EXPECT_EQ(world.inquire(), kAskAndLeave);
  EXPECT_EQ(missing_text(world.lookout().departure()), "");
  EXPECT_EQ(survivors_of(world.lookout().departure()), (Ranks{0, 1, 2}));
}

TEST(Lookout, PausedRanksExcuseWhoeverWaitsForThem) {
  for (int paused = 0; paused < 4; ++paused) {
    LookoutWorld world(4, 0);
    world.rank(paused) = {kBehind, true, 0};
    EXPECT_EQ(world.inquire(), kAskOnly) << "behind: " << paused;
    world.rank(paused).place = kFront;
    world.everybody({kFront, false, 100});
    world.rank(paused).paused = true;
    EXPECT_EQ(world.inquire(), kAskOnly) << "in front: " << paused;
    // Someone who looks stuck may wait in something that the guard does not see.
    world.rank((paused + 1) % 4) = {kBehind, false, 30};
    EXPECT_EQ(world.inquire(), kAskOnly) << "another behind: " << paused;
    world.rank(paused).paused = false;
    EXPECT_EQ(world.inquire(), kAskAndLeave) << "resumed: " << paused;
  }
}

TEST(Lookout, ARankThatIsDoneWhileOthersAreNotHasLeft) {
  LookoutWorld world(3, 0);
  world.lookout().goodbye(2);
  world.silence(2);
  EXPECT_EQ(world.run(), Moves());  // alone no reason to leave
  EXPECT_EQ(world.inquire(), kAskAndLeave);
  EXPECT_EQ(missing_text(world.lookout().departure()), "2 left");
}

TEST(Lookout, AllWhoCanAnswerAreEnoughToConcludeAtTheNextTick) {
  LookoutWorld world(4, 0);
  world.rank(1) = {kBehind, false, 3};
  world.lookout().goodbye(3);
  world.lookout().suspect();
  ASSERT_EQ(world.tick(), Move::kAsk);
  world.answer(2);
  EXPECT_EQ(world.tick(), Move::kNothing);
  world.answer(1);
  EXPECT_EQ(world.tick(), Move::kLeave);
  EXPECT_EQ(missing_text(world.lookout().departure()), "3 left");
}

TEST(Lookout, TheLastOfSeveralAnswersCounts) {
  LookoutWorld world(3, 0);
  world.silence(2);
  world.lookout().suspect();
  ASSERT_EQ(world.tick(), Move::kAsk);
  world.rank(1) = {kBehind, false, 5};
  world.answer(1);
  world.answer(1);
  world.rank(1) = {kFront, false, 0};  // it moves again
  world.answer(1);
  world.wake(2);
  world.answer(2);
  EXPECT_EQ(world.tick(), Move::kNothing);
  EXPECT_EQ(world.run(), Moves());
}

TEST(Lookout, AnAnswerAfterTheInquiryIsNoAnswerToTheNext) {
  LookoutWorld world(3, 0);
  world.rank(1) = {kBehind, false, 0};
  EXPECT_EQ(world.inquire(), kAskOnly);
  world.answer(1);
  world.silence(1);
  EXPECT_EQ(world.inquire(), kAskAndLeave);
  EXPECT_EQ(missing_text(world.lookout().departure()), "1 silent");
}

TEST(Lookout, WhatUnknownRanksSayIsIgnored) {
  LookoutWorld world(3, 0);
  for (const int stranger : {-1, 0, 3, 1'000'000}) {
    world.lookout().answered(stranger, {{9, 9, 9, Phase::kUpdate}, true, 99});
    world.lookout().closed(stranger);
    world.lookout().goodbye(stranger);
  }
  EXPECT_EQ(world.run(), Moves());
  world.rank(2) = {kBehind, false, 1};
  EXPECT_EQ(world.inquire(), kAskAndLeave);
  EXPECT_EQ(missing_text(world.lookout().departure()), "2 stuck");
  EXPECT_EQ(survivors_of(world.lookout().departure()), (Ranks{0, 1}));
}

TEST(Lookout, OneSuspicionIsOneInquiryAndThoseDuringItAreNoMore) {
  LookoutWorld world(3, 0);
  world.rank(1) = {kBehind, false, 0};
  world.lookout().suspect();
  ASSERT_EQ(world.tick(), Move::kAsk);
  world.lookout().suspect();
  world.all_answer();
  world.lookout().suspect();
  EXPECT_EQ(world.run(), Moves());
  EXPECT_EQ(world.inquire(), kAskOnly);
}

constexpr Answer kMoving{kFront, false, 0};

TEST(LookoutHurried, WhoIsSilentIsNamedAheadOfTheDeadlineAndSooner) {
  LookoutWorld world(4, 0);
  world.everybody(kMoving);
  world.silence(2);
  world.lookout().hurry();
  EXPECT_EQ(world.run(LookoutWorld::kHurriedTicks), kAskOnly);
  EXPECT_EQ(world.tick(), Lookout::Move::kLeave);
  EXPECT_EQ(missing_text(world.lookout().departure()), "2 silent");
  EXPECT_EQ(survivors_of(world.lookout().departure()), (Ranks{0, 1, 3}));
}

TEST(LookoutHurried, WhereEverybodyAnswersNothingIsSaid) {
  LookoutWorld world(4, 0);
  world.everybody(kMoving);
  world.lookout().hurry();
  EXPECT_EQ(world.run(), kAskOnly);
}

TEST(LookoutHurried, TheNextInquiryIsInNoHurryAnyMore) {
  LookoutWorld world(4, 0);
  world.everybody(kMoving);
  world.lookout().hurry();
  EXPECT_EQ(world.run(), kAskOnly);
  world.silence(2);
  world.lookout().suspect();
  EXPECT_EQ(world.run(LookoutWorld::kAnswerTicks), kAskOnly);
  EXPECT_EQ(world.tick(), Lookout::Move::kLeave);
  EXPECT_EQ(missing_text(world.lookout().departure()), "2 silent");
}

// An orderly stop: the ranks leave one after the other, and one is still asked where it is.
TEST(LookoutHurried, WhoHasLeftIsNotMissedWhileNobodyWaitsForIt) {
  for (const int self : {0, 1}) {
    LookoutWorld world(4, self, self == 1 ? 0 : -1);
    world.everybody(kMoving);
    world.lookout().goodbye(self == 0 ? 1 : 0);
    world.lookout().goodbye(3);
    world.lookout().hurry();
    EXPECT_EQ(world.run(), kAskOnly);
    world.rank(2).deadlines_missed = 1;
    EXPECT_EQ(world.inquire(), kAskAndLeave);
    EXPECT_EQ(missing_text(world.lookout().departure()), self == 0 ? "1 left, 3 left" : "0 left, 3 left");
  }
}

// ---- a transport that failed

// Nobody is overdue; rank 1's watchdog found the transport lost, and rank 0 asks once a second.
LookoutWorld world_without_a_transport(int self = 0, int defers_to = -1) {
  LookoutWorld world(3, self, defers_to);
  world.everybody({kFront, false, 0});
  world.rank(1).lost = "the cable is out";
  return world;
}

// Suspected every ten ticks, as the watchdogs do; the ticks after which it is left, or -1.
int ticks_until_left(LookoutWorld& world, int most = 200) {
  for (int i = 0; i < most; ++i) {
    if (i % 10 == 0) world.lookout().suspect();
    const Move move = world.tick();
    if (move == Move::kAsk) world.all_answer();
    if (move == Move::kLeave) return i;
  }
  return -1;
}

TEST(LookoutTransport, ATrainerHasTheGraceToComeByBeforeAllLeaveAndNobodyIsCalledMissing) {
  LookoutWorld world = world_without_a_transport();
  const int left = ticks_until_left(world);
  EXPECT_GT(left, LookoutWorld::kLostTicks);
  EXPECT_LE(left, LookoutWorld::kLostTicks + 12);
  const Departure& departure = world.lookout().departure();
  EXPECT_EQ(missing_text(departure), "");
  EXPECT_EQ(survivors_of(departure), (Ranks{0, 1, 2}));
  EXPECT_EQ(departure.transport_failure, "rank 1: the cable is out");
  EXPECT_EQ(departure.describe(),
            "the transport failed, and nobody is known to be missing. 3 left behind, rank 0 (host node0, pid "
            "1000) at attempt 20 of epoch 1, phase decide. Transport of rank 1: the cable is out");
}

TEST(LookoutTransport, IsThisRanksOwnOrThatOfTheLowestRank) {
  LookoutWorld world = world_without_a_transport();
  world.rank(2).lost = "no carrier";
  EXPECT_GT(ticks_until_left(world), 0);
  EXPECT_EQ(world.lookout().departure().transport_failure, "rank 1: the cable is out");
  LookoutWorld own = world_without_a_transport();
  own.rank(0).lost = "cut";
  EXPECT_GT(ticks_until_left(own), 0);
  EXPECT_EQ(own.lookout().departure().transport_failure, "rank 0: cut");
}

TEST(LookoutTransport, ATrainerThatCameByEndsTheGrace) {
  LookoutWorld world = world_without_a_transport();
  EXPECT_EQ(ticks_until_left(world, LookoutWorld::kLostTicks), -1);
  world.rank(1).trainer_knows = true;
  EXPECT_EQ(ticks_until_left(world), -1);
  world.rank(1).trainer_knows = false;
  EXPECT_GT(ticks_until_left(world), LookoutWorld::kLostTicks);
}

TEST(LookoutTransport, NobodyLeavesWhileARankIsPausedAndTheGraceBeginsAfterThat) {
  for (const int paused : {0, 2}) {
    LookoutWorld world = world_without_a_transport();
    world.rank(paused).paused = true;
    EXPECT_EQ(ticks_until_left(world), -1);
    world.rank(paused).paused = false;
    EXPECT_GT(ticks_until_left(world), LookoutWorld::kLostTicks);
  }
}

TEST(LookoutTransport, ARankThatDiedWithItIsNamedAtOnceAndTheFailureBesideIt) {
  LookoutWorld world = world_without_a_transport();
  world.answer(1);
  world.lookout().closed(2);
  EXPECT_LT(ticks_until_left(world), 10);
  EXPECT_EQ(missing_text(world.lookout().departure()), "2 died");
  EXPECT_EQ(world.lookout().departure().transport_failure, "rank 1: the cable is out");
}

// Who met it ends first, and is not to be taken for its cause.
TEST(LookoutTransport, OfARankThatDiedOfItIsOnRecord) {
  LookoutWorld world = world_without_a_transport();
  world.answer(1);
  world.lookout().closed(1);
  EXPECT_LT(ticks_until_left(world), 10);
  EXPECT_EQ(missing_text(world.lookout().departure()), "1 died");
  EXPECT_EQ(world.lookout().departure().transport_failure, "rank 1: the cable is out");
}

TEST(LookoutTransport, OfARankThatIsDoneIsOfNoAccount) {
  LookoutWorld world = world_without_a_transport();
  world.answer(1);
  world.lookout().goodbye(1);
  EXPECT_EQ(ticks_until_left(world), -1);
}

TEST(LookoutTransport, ADeputyLeavesItToRankZeroWhileThatAnswers) {
  LookoutWorld world = world_without_a_transport(1, 0);
  EXPECT_EQ(ticks_until_left(world), -1);
}

}  // namespace
}  // namespace holdfast
