#include "train/schedule.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace holdfast::train {
namespace {

// Field case 19.
TEST(Schedule, ASkippedAttemptDoesNotAdvanceIt) {
  Schedule schedule;
  schedule.peak = 0.1;
  schedule.decay = Schedule::Decay::kExponential;
  schedule.decay_rate = 0.5;
  std::vector<double> rates;
  std::uint64_t updates = 0;
  std::uint64_t attempts = 0;
  for (; attempts < 4; ++attempts) {
    rates.push_back(schedule.rate(updates));
    const bool skipped = attempts == 1;
    if (!skipped) ++updates;
  }
  EXPECT_EQ(rates, (std::vector<double>{0.1, 0.05, 0.05, 0.025}));
  EXPECT_EQ(updates, 3u);
  EXPECT_EQ(attempts, 4u);
}

TEST(Schedule, WithoutDecayTheRateIsThePeakForEver) {
  Schedule schedule;
  schedule.peak = 0.3;
  for (const std::uint64_t update : {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{1} << 60}) {
    EXPECT_EQ(schedule.rate(update), 0.3);
  }
}

TEST(Schedule, TheWarmUpIsLinearStartsAboveZeroAndEndsAtThePeak) {
  for (const auto decay : {Schedule::Decay::kNone, Schedule::Decay::kCosine, Schedule::Decay::kExponential}) {
    Schedule schedule;
    schedule.peak = 1.0;
    schedule.warmup_updates = 4;
    schedule.total_updates = 10;
    schedule.decay = decay;
    for (std::uint64_t update = 0; update < 4; ++update) {
      EXPECT_EQ(schedule.rate(update), 0.25 * static_cast<double>(update + 1));
    }
    EXPECT_EQ(schedule.rate(4), 1.0);  // decay begins here
  }
}

TEST(Schedule, ACosineIsAtHalfInTheMiddleAndAtZeroFromItsEndOn) {
  Schedule schedule;
  schedule.peak = 0.8;
  schedule.warmup_updates = 10;
  schedule.total_updates = 110;
  schedule.decay = Schedule::Decay::kCosine;
  EXPECT_EQ(schedule.rate(10), 0.8);
  EXPECT_NEAR(schedule.rate(60), 0.4, 1e-15);
  EXPECT_NEAR(schedule.rate(35), 0.4 * (1.0 + std::sqrt(0.5)), 1e-15);
  for (std::uint64_t update = 10; update < 110; ++update) {
    EXPECT_GT(schedule.rate(update), schedule.rate(update + 1)) << update;
  }
  EXPECT_GT(schedule.rate(109), 0.0);
  for (const std::uint64_t update : {std::uint64_t{110}, std::uint64_t{111}, std::uint64_t{1} << 60}) {
    EXPECT_EQ(schedule.rate(update), 0.0);
  }
}

TEST(Schedule, ACosineWithNothingAfterTheWarmUpEndsAtOnceAndIsFinite) {
  Schedule schedule;
  schedule.peak = 0.8;
  schedule.warmup_updates = 10;
  schedule.total_updates = 5;
  schedule.decay = Schedule::Decay::kCosine;
  EXPECT_EQ(schedule.rate(9), 0.8);
  EXPECT_EQ(schedule.rate(10), 0.8);
  EXPECT_EQ(schedule.rate(11), 0.0);
}

TEST(Schedule, AnExponentialDecayCountsFromTheEndOfTheWarmUp) {
  Schedule schedule;
  schedule.peak = 1.0;
  schedule.warmup_updates = 3;
  schedule.decay = Schedule::Decay::kExponential;
  schedule.decay_rate = 0.25;
  EXPECT_EQ(schedule.rate(3), 1.0);
  EXPECT_EQ(schedule.rate(4), 0.25);
  EXPECT_EQ(schedule.rate(8), 0x1p-10);
}

}  // namespace
}  // namespace holdfast::train
