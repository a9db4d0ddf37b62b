#include "holdfast/spike_detector.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <limits>
#include <random>
#include <vector>

#include "coord/events.h"
#include "ranks/guarded_ranks.h"

namespace holdfast {
namespace {

constexpr int kRanks = 4;
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

// Gradient norms as they are: around 2, skewed.
class Norms {
 public:
  explicit Norms(std::uint64_t seed) : random_(seed) {}
  double next() { return std::exp(0.7 + 0.2 * normal_(random_)); }

 private:
  std::mt19937_64 random_;
  std::normal_distribution<double> normal_;
};

int spikes_in(SpikeDetector& detector, Norms& norms, int values) {
  int spikes = 0;
  for (int i = 0; i < values; ++i) spikes += detector.add(norms.next()) ? 1 : 0;
  return spikes;
}

TEST(SpikeDetector, AfterOneNanAndAThousandGoodValuesASpikeIsFound) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    SpikeDetector detector((SpikeOptions()));
    Norms norms(seed);
    EXPECT_FALSE(detector.add(kNan));
    EXPECT_EQ(spikes_in(detector, norms, 1000), 0) << seed;
    EXPECT_TRUE(detector.add(100.0)) << seed;
    EXPECT_FALSE(detector.add(norms.next())) << seed;
  }
}

TEST(SpikeDetector, ValuesThatAreNotFiniteOrNotPositiveChangeNothing) {
  SpikeDetector with((SpikeOptions()));
  SpikeDetector without((SpikeOptions()));
  Norms norms(3);
  for (int i = 0; i < 300; ++i) {
    const double value = norms.next();
    for (const double odd : {kNan, kInf, -kInf, -kNan, 0.0, -0.0, -5.0}) EXPECT_FALSE(with.add(odd)) << odd;
    EXPECT_EQ(with.add(value), without.add(value));
    ASSERT_EQ(with.threshold(), without.threshold()) << i;
  }
  EXPECT_TRUE(std::isfinite(with.threshold()));
  EXPECT_TRUE(with.add(100.0));
}

TEST(SpikeDetector, HugeValuesInUpToAThirdOfTheWindowDoNotBlindIt) {
  SpikeDetector detector((SpikeOptions()));
  Norms norms(4);
  spikes_in(detector, norms, 200);
  for (int i = 0; i < 600; ++i) {
    if (i % 3 == 0) {
      EXPECT_TRUE(detector.add(i % 2 == 0 ? 1e300 : std::numeric_limits<double>::max())) << i;
    } else {
      EXPECT_FALSE(detector.add(norms.next())) << i;
    }
  }
  EXPECT_TRUE(detector.add(1e6));
}

TEST(SpikeDetector, HugeValuesLeaveWithTheWindowEvenWhenTheyFilledIt) {
  SpikeDetector detector((SpikeOptions()));
  Norms norms(5);
  spikes_in(detector, norms, 200);
  for (int i = 0; i < 200; ++i) detector.add(1e300);
  EXPECT_FALSE(detector.add(100.0));  // the yardstick is huge now
  EXPECT_EQ(spikes_in(detector, norms, 200), 0);
  EXPECT_TRUE(detector.add(100.0));
}

TEST(SpikeDetector, AConstantSeriesIsNoReasonToCallARoundingErrorASpike) {
  for (const double constant : {1e-300, 1e-7, 1.0, 3.7, 1e300}) {
    SpikeDetector detector((SpikeOptions()));
    for (int i = 0; i < 500; ++i) ASSERT_FALSE(detector.add(constant)) << constant;
    EXPECT_FALSE(detector.add(std::nextafter(constant, kInf))) << constant;
    EXPECT_FALSE(detector.add(constant * 1.01)) << constant;
    EXPECT_TRUE(detector.add(constant * 1.5)) << constant;
  }
}

TEST(SpikeDetector, WithTooFewValuesNothingIsASpike) {
  SpikeDetector detector((SpikeOptions()));
  for (int i = 0; i < 49; ++i) {
    EXPECT_EQ(detector.threshold(), kInf) << i;
    EXPECT_FALSE(detector.add(1.0));
    EXPECT_FALSE(detector.add(kNan));  // does not count as a value
  }
  EXPECT_EQ(detector.threshold(), kInf);
  EXPECT_FALSE(detector.add(1e300));
  EXPECT_LT(detector.threshold(), 2.0);
  EXPECT_TRUE(detector.add(2.0));
}

TEST(SpikeDetector, OnlyTheLastWindowOfValuesCounts) {
  SpikeOptions options;
  options.window = 20;
  options.least_values = 20;
  SpikeDetector detector(options);
  for (int i = 0; i < 1000; ++i) detector.add(1e-3);
  for (int i = 0; i < 20; ++i) detector.add(1.0);
  SpikeDetector fresh(options);
  for (int i = 0; i < 20; ++i) fresh.add(1.0);
  EXPECT_EQ(detector.threshold(), fresh.threshold());
}

TEST(SpikeDetector, AFallIsNotASpikeAndSlowGrowthIsFollowed) {
  SpikeDetector detector((SpikeOptions()));
  Norms norms(6);
  spikes_in(detector, norms, 200);
  EXPECT_FALSE(detector.add(1e-200));
  double level = 1.0;
  for (int i = 0; i < 4000; ++i) {
    level *= 1.002;
    ASSERT_FALSE(detector.add(level * norms.next())) << i;
  }
  EXPECT_GT(level, 1000.0);
}

// Median 8 and deviations 0 or 1 octaves: the yardstick worked out by hand.
TEST(SpikeDetector, TheThresholdIsTheMedianAndTheScaledMedianDeviationOfTheLogarithms) {
  SpikeOptions options;
  options.window = 9;
  options.least_values = 9;
  options.deviations = 2.0;
  SpikeDetector detector(options);
  for (const double value : {4.0, 16.0, 8.0, 4.0, 16.0, 8.0, 1e200, 1e-200, 8.0}) detector.add(value);
  // Distances from log 8: three 0, four log 2, two huge. The fifth of nine is log 2.
  EXPECT_NEAR(detector.threshold(), 8.0 * std::exp(2.0 * 1.4826 * std::log(2.0)), 1e-9);
}

// Sixty attempts with values around 1, then one of 1000, then one as before.
std::vector<Decision> run_into_a_spike(const std::string& policy, const std::string& run_dir) {
  Decisions decisions(kRanks);
  run_guarded(kRanks, guard_options(policy, run_dir), [&](StepGuard& guard, int rank) {
    for (int i = 0; i < 62; ++i) {
      decisions.add(rank, attempt(guard, [&] {
                      EXPECT_EQ(guard.watch("norm", i == 60 ? 1000.0 : 1.0 + 0.01 * (i % 7)), i == 60) << i;
                      EXPECT_FALSE(guard.watch("loss", 1.0));
                    }));
    }
    decisions.add(rank, guard.close());
  });
  return decisions.agreed();
}

double middle_of(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

// The window is kept sorted as it moves on: bit for bit what sorting all of it gives, with values that are
// there more than once, too.
TEST(SpikeDetector, TheThresholdIsThatOfTheWindowAsItIsAfterEachValue) {
  std::mt19937_64 random(5);
  for (const std::size_t window : {1u, 2u, 7u, 50u}) {
    SpikeDetector detector({window, 1, 12.0});
    for (int i = 0; i < 400; ++i) {
      detector.add(std::exp(0.25 * static_cast<double>(random() % 9)) + (i % 3 == 0 ? 1e-3 * i : 0.0));
      const std::vector<double> logs(detector.logs().begin(), detector.logs().end());
      const double center = middle_of(logs);
      std::vector<double> distances;
      for (const double log : logs) distances.push_back(std::abs(log - center));
      ASSERT_EQ(detector.threshold(), std::exp(center + 12.0 * std::max(1.4826 * middle_of(distances), 0.02)))
          << window << " " << i;
    }
    SpikeDetector restored({window, 1, 12.0});
    restored.restore(detector.logs());
    EXPECT_EQ(restored.threshold(), detector.threshold());
    SpikeDetector shorter({(window + 1) / 2, 1, 12.0});
    std::deque<double> logs = detector.logs();
    logs.push_front(kNan);
    shorter.restore(logs);
    EXPECT_EQ(shorter.logs().size(), (window + 1) / 2);
    EXPECT_TRUE(std::isfinite(shorter.threshold()));
  }
}

TEST(SpikeWarning, ASpikeIsOnRecordButAppliedByDefault) {
  const TempDir temp;
  for (const Decision& decision : run_into_a_spike("max_total_skips: 0", temp / "run")) {
    EXPECT_TRUE(decision.apply());
  }
  const std::vector<Json> spikes = events_named(temp / "run", "spike");
  ASSERT_EQ(spikes.size(), 1u);
  EXPECT_EQ(spikes[0]["name"], "norm");
  EXPECT_EQ(spikes[0]["value"], 1000.0);
  EXPECT_EQ(spikes[0]["attempt"], 60);
  EXPECT_LT(spikes[0]["threshold"].get<double>(), 1000.0);
  EXPECT_EQ(events_named(temp / "run", "run_finished").at(0)["skips"], 0);
}

TEST(SpikeWarning, WithActionSkipEveryRankSkipsThatAttemptAndItIsCharged) {
  const TempDir temp;
  const std::vector<Decision> decisions = run_into_a_spike("spike { action: SKIP }", temp / "run");
  for (std::size_t i = 0; i < decisions.size(); ++i) {
    EXPECT_EQ(decisions[i].action, i == 60 ? Action::kSkip : Action::kApply) << i;
  }
  const std::vector<Json> skipped = events_named(temp / "run", "attempt_skipped");
  ASSERT_EQ(skipped.size(), 1u);
  EXPECT_EQ(skipped[0]["total"], 1);
  EXPECT_TRUE(skipped[0]["reason"].get<std::string>().starts_with("spike of norm: 1000")) << skipped[0];
  EXPECT_EQ(events_named(temp / "run", "run_finished").at(0)["skips"], 1);
}

TEST(SpikeWarning, WithActionSkipASpikeBeyondTheBudgetAborts) {
  Decisions decisions(kRanks);
  run_guarded(kRanks, guard_options("spike { action: SKIP } max_total_skips: 0"),
              [&](StepGuard& guard, int rank) {
                for (int i = 0; i < 50; ++i) attempt(guard, [&] { guard.watch("norm", 1.0); });
                decisions.add(rank, attempt(guard, [&] { guard.watch("norm", 9.0); }));
              });
  EXPECT_EQ(decisions.agreed_actions(), Actions{"ABORT 81"});
}

}  // namespace
}  // namespace holdfast
