#include "stall_clock.h"

#include <gtest/gtest.h>

namespace holdfast {
namespace {

constexpr std::int64_t kFloor = 30;

// A training thread that is seen once a tick.
class Trainer {
 public:
  explicit Trainer(StallClock& clock) : clock_(clock) {}

  // `ticks` ticks pass while nothing moves.
  void stand(std::int64_t ticks, bool paused = false) {
    for (std::int64_t i = 0; i < ticks; ++i) clock_.tick(beats_, attempt_, paused);
  }
  // `attempts` attempts end, all before the next tick.
  void finish(std::uint64_t attempts = 1) {
    attempt_ += attempts;
    beats_ += attempts;
    clock_.tick(beats_, attempt_, false);
  }
  // An attempt that takes `ticks`.
  void attempt(std::int64_t ticks) {
    stand(ticks - 1);
    finish();
  }
  void jump_to(std::uint64_t attempt) {
    attempt_ = attempt;
    ++beats_;
    clock_.tick(beats_, attempt_, false);
  }
  void beat() { clock_.tick(++beats_, attempt_, false); }

 private:
  StallClock& clock_;
  std::uint64_t beats_ = 0;
  std::uint64_t attempt_ = 0;
};

TEST(StallClock, CountsTicksWithoutProgressUpToTheDeadlineExactly) {
  StallClock clock(10, kFloor);
  Trainer trainer(clock);
  trainer.beat();
  EXPECT_EQ(clock.stalled(), 0);
  trainer.stand(9);
  EXPECT_EQ(clock.stalled(), 9);
  EXPECT_FALSE(clock.overdue());
  trainer.stand(1);
  EXPECT_TRUE(clock.overdue());
  trainer.beat();
  EXPECT_EQ(clock.stalled(), 0);
  EXPECT_FALSE(clock.overdue());
}

TEST(StallClock, AnyCallOfTheAttemptIsProgress) {
  StallClock clock(3, kFloor);
  Trainer trainer(clock);
  for (int tensor = 0; tensor < 100; ++tensor) {
    trainer.beat();
    trainer.stand(2);
    EXPECT_FALSE(clock.overdue());
  }
}

TEST(StallClock, AFixedDeadlineStaysWhateverTheAttemptsTake) {
  StallClock clock(10, kFloor);
  Trainer trainer(clock);
  EXPECT_EQ(clock.deadline(), 10);
  for (int i = 0; i < 50; ++i) trainer.attempt(100);
  EXPECT_EQ(clock.deadline(), 10);
}

TEST(StallClock, TheFirstAttemptsHaveFiveTimesTheFloor) {
  StallClock clock(0, kFloor);
  Trainer trainer(clock);
  for (std::size_t attempts = 0; attempts < StallClock::kEnoughAttempts; ++attempts) {
    EXPECT_EQ(clock.deadline(), 5 * kFloor) << attempts;
    trainer.attempt(2);
  }
  EXPECT_EQ(clock.deadline(), 20 * 2);
}

TEST(StallClock, TheDeadlineIsTwentyMedianAttemptsAndOneSlowAttemptDoesNotMoveIt) {
  StallClock clock(0, kFloor);
  Trainer trainer(clock);
  for (int i = 0; i < 20; ++i) trainer.attempt(7);
  trainer.attempt(100'000);
  EXPECT_EQ(clock.deadline(), 140);
}

TEST(StallClock, TheDeadlineFollowsAttemptsThatBecomeSlower) {
  StallClock clock(0, kFloor);
  Trainer trainer(clock);
  for (int i = 0; i < 1000; ++i) trainer.attempt(2);
  EXPECT_EQ(clock.deadline(), 40);
  for (int i = 0; i < 1000; ++i) trainer.attempt(50);
  EXPECT_EQ(clock.deadline(), 1000);
}

TEST(StallClock, TheDeadlineIsNeverUnderTheFloor) {
  StallClock clock(0, kFloor);
  Trainer trainer(clock);
  for (int i = 0; i < 20; ++i) trainer.attempt(1);
  EXPECT_EQ(clock.deadline(), kFloor);
}

TEST(StallClock, AttemptsFasterThanATickCountAsFractions) {
  StallClock clock(0, 1);
  Trainer trainer(clock);
  for (int i = 0; i < 20; ++i) trainer.finish(5);  // a fifth of a tick each
  EXPECT_EQ(clock.deadline(), 4);
  for (int i = 0; i < 200; ++i) trainer.finish(1000);
  EXPECT_EQ(clock.deadline(), 1);
}

// Without the automatic deadline's help: 0 would be overdue at once, for ever.
TEST(StallClock, TheDeadlineIsAtLeastOneTick) {
  EXPECT_GE(StallClock(0, 0).deadline(), 1);
  EXPECT_FALSE(StallClock(0, 0).overdue());
}

TEST(StallClock, WhilePausedNothingCounts) {
  StallClock clock(10, kFloor);
  Trainer trainer(clock);
  trainer.stand(9);
  trainer.stand(1000, true);
  EXPECT_EQ(clock.stalled(), 0);
  trainer.stand(9);
  EXPECT_FALSE(clock.overdue());
  trainer.stand(1);
  EXPECT_TRUE(clock.overdue());
}

TEST(StallClock, APauseBetweenTwoAttemptsDoesNotMakeAttemptsLonger) {
  StallClock clock(0, kFloor);
  Trainer trainer(clock);
  for (int i = 0; i < 20; ++i) {
    trainer.attempt(4);
    trainer.stand(5000, true);
  }
  EXPECT_EQ(clock.deadline(), 80);
}

// An evaluation inside each attempt: what remains of the attempt after it is not how long an attempt takes.
TEST(StallClock, APauseInsideAnAttemptDoesNotMakeAttemptsShorter) {
  StallClock clock(0, 600);
  Trainer trainer(clock);
  for (int i = 0; i < 20; ++i) {
    trainer.stand(1000);
    trainer.stand(50, true);
    trainer.finish();
  }
  EXPECT_GE(clock.deadline(), 1000);
}

TEST(StallClock, ARestoredRunThatRepeatsAttemptsIsProgressAndNoSample) {
  StallClock clock(0, kFloor);
  Trainer trainer(clock);
  trainer.jump_to(5000);  // a run that goes on from a checkpoint
  for (int i = 0; i < 20; ++i) trainer.attempt(6);
  EXPECT_EQ(clock.deadline(), 120);
  for (int i = 0; i < 20; ++i) {
    trainer.stand(70);
    for (const std::uint64_t generation : {10u, 9u, 8u}) trainer.jump_to(generation);  // back, and again
    EXPECT_EQ(clock.stalled(), 0);
    trainer.attempt(6);
  }
  EXPECT_EQ(clock.deadline(), 120);
}

}  // namespace
}  // namespace holdfast
