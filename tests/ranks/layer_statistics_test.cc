// Layers are measured after an incident, for as many attempts as the policy says, and never otherwise.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>

#include "coord/events.h"
#include "count_allocations.h"
#include "holdfast/coord/evidence/bundle.h"
#include "holdfast/coord/evidence/evidence.pb.h"
#include "ranks/guarded_ranks.h"

namespace holdfast {
namespace {

using Kind = EvidenceRecorder::Kind;

class LayerStatistics : public testing::Test {
 protected:
  GuardOptions options(const std::string& evidence) const {
    return guard_options(std::string(kSkipAnything) + " evidence { " + evidence + " }", temp_ / "run");
  }

  // One attempt, whose layer has the values {1, -i}; whether it was measured.
  static bool step(StepGuard& guard, float i, bool bad = false, int micro_batches = 1) {
    guard.begin();
    const bool wanted = guard.wants_layers();
    for (int m = 0; m < micro_batches; ++m) {
      const std::vector<float> values = {1.0f, -(i + static_cast<float>(m))};
      guard.micro_batch(m);
      guard.observe_layer(Stage::kForward, Kind::kActivation, "conv1", TensorView::of(values));
      guard.observe_layer(Stage::kBackward, Kind::kActivationGradient, "conv1/gradient",
                          TensorView::of(values));
    }
    guard.micro_batch(StepGuard::kWholeWindow);
    observe_values(guard, Stage::kBackward, "w", {bad ? kNanF : 1.0f});
    static_cast<void>(guard.decide());
    guard.finish();
    return wanted;
  }

  std::vector<Json> lines() const {
    std::vector<Json> all;
    std::ifstream file(temp_ / "run/layers.jsonl");
    for (std::string line; std::getline(file, line);) all.push_back(Json::parse(line));
    return all;
  }

  BundleManifest manifest(const std::string& name) const {
    std::unique_ptr<Bundle> bundle;
    const Status opened = Bundle::open(real_file_system(), temp_ / ("run/incidents/" + name), &bundle);
    EXPECT_TRUE(opened.ok()) << opened.to_string();
    return bundle ? bundle->manifest() : BundleManifest();
  }

  const TempDir temp_;
};

TEST_F(LayerStatistics, AreTakenInAsManyAttemptsAfterAnIncidentAsThePolicySays) {
  run_guarded(2, options("layer_statistics_attempts: 3"), [&](StepGuard& guard, int rank) {
    guard.provide_evidence({});
    std::vector<bool> measured;
    for (int i = 0; i < 8; ++i) measured.push_back(step(guard, 2.0f, rank == 1 && i == 2));
    EXPECT_EQ(measured, (std::vector<bool>{false, false, false, true, true, true, false, false}));
    EXPECT_FALSE(guard.wants_layers());
    EXPECT_TRUE(guard.close().apply());
  });
  std::vector<int> attempts;
  for (const Json& line : lines()) attempts.push_back(line["attempt"].get<int>());
  EXPECT_EQ(attempts, (std::vector<int>{3, 4, 5}));  // of rank 0 alone
}

TEST_F(LayerStatistics, AnIncidentAmongThemBeginsAnew) {
  run_guarded(2, options("layer_statistics_attempts: 2"), [&](StepGuard& guard, int rank) {
    guard.provide_evidence({});
    std::vector<bool> measured;
    for (int i = 0; i < 6; ++i) measured.push_back(step(guard, 2.0f, rank == 1 && (i == 0 || i == 2)));
    EXPECT_EQ(measured, (std::vector<bool>{false, true, true, true, true, false}));
    EXPECT_TRUE(guard.close().apply());
  });
}

TEST_F(LayerStatistics, AreThoseOfTheWholeAttempt) {
  run_guarded(1, options("layer_statistics_attempts: 1"), [&](StepGuard& guard, int) {
    guard.provide_evidence({});
    step(guard, 2.0f, true);
    step(guard, 2.0f, false, 2);  // {1, -2}, {1, -3}
    EXPECT_TRUE(guard.close().apply());
  });
  ASSERT_EQ(lines().size(), 1u);
  const Json line = lines()[0];
  ASSERT_EQ(line["layers"].size(), 2u);
  EXPECT_EQ(line["epoch"], 1);
  EXPECT_EQ(line["layers"][0]["tensor"], "conv1");
  EXPECT_EQ(line["layers"][0]["stage"], "forward");
  EXPECT_EQ(line["layers"][0]["kind"], "ACTIVATION");
  EXPECT_EQ(line["layers"][0]["elements"], 4);
  EXPECT_EQ(line["layers"][0]["abs_max"], 3.0);
  EXPECT_EQ(line["layers"][0]["root_mean_square"], std::sqrt(15.0 / 4));
  EXPECT_EQ(line["layers"][1]["tensor"], "conv1/gradient");
  EXPECT_EQ(line["layers"][1]["stage"], "backward");
}

TEST_F(LayerStatistics, TheLastAttemptsAreInTheNextIncidentsRecord) {
  run_guarded(2, options("layer_statistics_attempts: 50"), [&](StepGuard& guard, int rank) {
    guard.provide_evidence({});
    for (int i = 0; i <= 12; ++i) step(guard, static_cast<float>(i + 2), rank == 1 && (i == 0 || i == 12));
    EXPECT_TRUE(guard.close().apply());
  });
  const BundleManifest first = manifest("e0001-a0000000000");
  for (const EvidencePart& part : first.parts()) EXPECT_EQ(part.trend_size(), 0);
  const BundleManifest second = manifest("e0001-a0000000012");
  ASSERT_EQ(second.parts_size(), 2);
  for (const EvidencePart& part : second.parts()) {
    ASSERT_EQ(part.trend_size(), 8);
    for (int i = 0; i < 8; ++i) {
      EXPECT_EQ(part.trend(i).attempt(), static_cast<std::uint64_t>(5 + i));
      ASSERT_EQ(part.trend(i).layers_size(), 2);
      EXPECT_EQ(part.trend(i).layers(0).abs_max(), 5 + i + 2);
    }
  }
}

TEST_F(LayerStatistics, ByDefaultNothingIsReadAndNothingAllocated) {
  run_guarded(1, options(""), [&](StepGuard& guard, int) {
    guard.provide_evidence({});
    const std::vector<float> values(4, 1.0f);
    const auto allocations = [&] {
      const long before = g_allocations;
      guard.begin();
      EXPECT_FALSE(guard.wants_layers());
      // Memory that is not there.
      guard.observe_layer(Stage::kForward, Kind::kActivation, "conv1",
                          TensorView::contiguous(nullptr, DType::kFloat32, 1000));
      guard.observe(Stage::kBackward, "w", TensorView::of(values));
      static_cast<void>(guard.decide());
      guard.finish();
      return g_allocations - before;
    };
    for (int i = 0; i < 10; ++i) allocations();
    long all = 0;
    for (int i = 0; i < 100; ++i) all += allocations();
    EXPECT_EQ(all, 0);
    step(guard, 2.0f, true);  // evidence of it is written by another thread, which allocates
    allocations();
    EXPECT_TRUE(guard.close().apply());
  });
  EXPECT_FALSE(real_file_system().exists(temp_ / "run/layers.jsonl"));
}

}  // namespace
}  // namespace holdfast
