#include "holdfast/coord/dropped_data.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <stdexcept>

#include "coord/events.h"
#include "coord/sample_incident.h"
#include "holdfast/coord/coordinator.h"
#include "holdfast/coord/policy.h"
#include "holdfast/coord/policy.pb.h"
#include "holdfast/coord/state.pb.h"

namespace holdfast {
namespace {

TEST(ChiSquare, TheTailIsThatOfTheTables) {
  EXPECT_EQ(chi_square_tail(0.0, 3), 1.0);
  EXPECT_NEAR(chi_square_tail(3.841458820694124, 1), 0.05, 1e-12);
  EXPECT_NEAR(chi_square_tail(16.918977604620448, 9), 0.05, 1e-12);
  EXPECT_NEAR(chi_square_tail(27.877164871256568, 9), 0.001, 1e-12);
  EXPECT_NEAR(chi_square_tail(14.067140449340169, 7), 0.05, 1e-12);
  // Two degrees of freedom: an exponential.
  for (const double x : {0.1, 1.0, 3.9, 4.1, 50.0, 700.0}) {
    EXPECT_NEAR(chi_square_tail(x, 2) / std::exp(-x / 2), 1.0, 1e-12) << x;
  }
  // Very many: nearly normal (Wilson-Hilferty).
  EXPECT_NEAR(chi_square_tail(4094.33, 4095), 0.5, 1e-3);
}

TEST(ChiSquare, TooFewToSayIsNotSaid) {
  const std::vector<std::uint64_t> even = {1, 1};
  EXPECT_FALSE(goodness_of_fit(std::vector<std::uint64_t>{9, 0}, even));
  EXPECT_TRUE(goodness_of_fit(std::vector<std::uint64_t>{10, 0}, even));
  EXPECT_FALSE(goodness_of_fit(std::vector<std::uint64_t>{100}, std::vector<std::uint64_t>{1}));
  EXPECT_FALSE(goodness_of_fit({}, {}));
}

TEST(ChiSquare, TheStatisticIsPearsons) {
  const auto fit =
      goodness_of_fit(std::vector<std::uint64_t>{44, 56, 7, 20}, std::vector<std::uint64_t>{5, 5, 0, 2});
  ASSERT_TRUE(fit);
  EXPECT_NEAR(fit->statistic, 36.0 / 50 + 36.0 / 50 + 0, 1e-12);
  EXPECT_EQ(fit->degrees, 2);
  EXPECT_EQ(fit->most_over, 1u);
  EXPECT_NEAR(fit->most_over_expected, 50, 1e-12);
}

// Ten classes of equal size; rank r's batch of attempt a is samples 100 r + 10 a to 100 r + 10 a + 9, one of
// each class, or all of one.
SampleSource source(std::int64_t only_class = -1) {
  SampleSource made;
  made.class_counts.assign(10, 6000);
  made.samples_of = [only_class](int rank, std::uint64_t attempt) {
    std::vector<Sample> samples;
    for (std::int64_t i = 0; i < 10; ++i) {
      samples.push_back(
          {100 * rank + 10 * static_cast<std::int64_t>(attempt) + i, only_class < 0 ? i : only_class});
    }
    return samples;
  };
  return made;
}

// Rank 0 of two, with its ledger.
struct Rank0 {
  explicit Rank0(SampleSource samples) {
    EXPECT_TRUE(parse_policy("max_total_skips: 1000 max_consecutive_skips: 1000", &policy).ok());
    start(std::move(samples));
  }
  void start(SampleSource samples) {
    coordinator.reset();
    const Status status = Coordinator::resume(policy, run_dir, &coordinator);
    EXPECT_TRUE(status.ok()) << status.to_string();
    coordinator->run_started(coordinator->memory().epoch(),
                             Topology({basic_placement(0), basic_placement(1)}));
    coordinator->keep_ledger(std::move(samples));
  }
  Decision bad(int origin) {
    Incident incident = one_nan(origin);
    incident.epoch = coordinator->memory().epoch();
    incident.attempt = coordinator->memory().attempt();
    return coordinator->handle(incident);
  }
  std::vector<Json> ledger() const { return parse_events(read_file(run_dir + "/dropped.jsonl")); }
  std::vector<Json> skews() const { return events_named(run_dir, "dropped_data_skewed"); }

  const TempDir temp;
  const std::string run_dir = temp / "run";
  Policy policy;
  std::unique_ptr<Coordinator> coordinator;
};

TEST(DroppedData, EachSkippedAttemptIsALineWithEveryRanksSamples) {
  Rank0 rank0(source());
  EXPECT_EQ(rank0.bad(1).action, Action::kSkip);
  rank0.coordinator->update_applied(1, 1, 0);
  EXPECT_EQ(rank0.bad(0).action, Action::kSkip);
  const auto lines = rank0.ledger();
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_EQ(lines[0]["event"], "dropped");
  EXPECT_EQ(lines[0]["attempt"], 0);
  EXPECT_EQ(lines[0]["origin"], 1);
  EXPECT_EQ(lines[1]["attempt"], 2);
  ASSERT_EQ(lines[1]["ranks"].size(), 2u);
  EXPECT_EQ(lines[1]["ranks"][1]["rank"], 1);
  EXPECT_EQ(lines[1]["ranks"][1]["samples"], (Json{120, 121, 122, 123, 124, 125, 126, 127, 128, 129}));
  EXPECT_EQ(lines[1]["ranks"][1]["classes"], (Json{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}));
  EXPECT_TRUE(rank0.skews().empty());
}

TEST(DroppedData, AClassThatIsDroppedOutOfProportionIsToldOnceAlsoAcrossARestart) {
  Rank0 rank0(source(3));
  for (int i = 0; i < 4; ++i) rank0.bad(i % 2);  // 20 samples each; from 50 on each class expects five
  ASSERT_EQ(rank0.skews().size(), 1u);
  const Json skew = rank0.skews()[0];
  EXPECT_EQ(skew["attempt"], 2);
  EXPECT_EQ(skew["of"], "classes");
  EXPECT_EQ(skew["statistic"], "chi_square");
  EXPECT_EQ(skew["degrees_of_freedom"], 9);
  EXPECT_NEAR(skew["value"].get<double>(), 540.0, 1e-9);
  EXPECT_LT(skew["p"].get<double>(), 1e-3);
  EXPECT_EQ(skew["most_over"]["index"], 3);
  EXPECT_EQ(skew["most_over"]["dropped"], 60);
  rank0.start(source(3));
  rank0.bad(0);
  EXPECT_EQ(rank0.skews().size(), 1u);
}

TEST(DroppedData, AShardThatIsDroppedOutOfProportionIsTold) {
  Rank0 rank0(source());
  for (int i = 0; i < 10; ++i) rank0.bad(1);
  EXPECT_EQ(rank0.skews().size(), 0u);  // ten of ten on one of two: p is 0.0016
  rank0.start(source());                // and the restart does not begin to count anew
  rank0.bad(1);
  ASSERT_EQ(rank0.skews().size(), 1u);
  EXPECT_EQ(rank0.skews()[0]["of"], "shards");
  EXPECT_EQ(rank0.skews()[0]["most_over"]["index"], 1);
  EXPECT_EQ(rank0.skews()[0]["degrees_of_freedom"], 1);
}

TEST(DroppedData, AFairSampleIsNotAccused) {
  Rank0 rank0(source());
  for (int i = 0; i < 100; ++i) rank0.bad(i % 2);
  EXPECT_TRUE(rank0.skews().empty());
}

TEST(DroppedData, ASamplerThatThrowsDoesNotChangeTheDecision) {
  SampleSource broken;
  broken.samples_of = [](int, std::uint64_t) -> std::vector<Sample> {
    throw std::runtime_error("no shard 7");
  };
  Rank0 rank0(broken);
  EXPECT_EQ(rank0.bad(1).action, Action::kSkip);
  EXPECT_EQ(events_named(rank0.run_dir, "samples_unknown").at(0)["reason"], "no shard 7");
  EXPECT_TRUE(rank0.ledger().empty());
}

}  // namespace
}  // namespace holdfast
