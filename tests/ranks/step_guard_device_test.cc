// decide() over a record that a device fills, whatever the device is.
#include <gtest/gtest.h>

#include <chrono>
#include <stdexcept>

#include "ranks/collective_decorators.h"
#include "ranks/guarded_ranks.h"

namespace holdfast {
namespace {

constexpr int kRanks = 2;

// Counts `bad` values of its own, and writes down what it is asked: s, m, u.
class FakeDevice final : public DeviceAttempt {
 public:
  explicit FakeDevice(Collective& collective) : collective_(collective) {}
  int rank() const override { return collective_.rank(); }
  int size() const override { return collective_.size() + more_ranks; }
  Status sum(Record* record) override {
    asked += 's';
    if (sum_throws) throw std::runtime_error("the device is on fire");
    if (bad != 0) {
      record->add_bad(Stage::kBackward, {bad, 0, 0});
      record->mark_bad(rank());
    }
    return collective_.reduce(*record);
  }
  Status measured(std::vector<DeviceMeasurement>* out) override {
    asked += 'm';
    Probe probe;
    out->push_back({Stage::kBackward, "finite", probe, 0, DType::kFloat32});
    probe.bad.nan = bad;
    probe.first_bad = 4;
    if (bad != 0) out->push_back({Stage::kBackward, "weights", probe, 100, DType::kBFloat16});
    if (measured_throws) throw std::runtime_error("the results are gone");
    return Status();
  }
  Status update_status() const override {
    asked += 'u';
    if (update_throws) throw std::runtime_error("no kernel");
    return Status();
  }

  std::uint64_t bad = 0;
  int more_ranks = 0;
  bool sum_throws = false;
  bool measured_throws = false;
  bool update_throws = false;
  mutable std::string asked;

 private:
  Collective& collective_;
};

struct Outcome {
  Decisions decisions{kRanks};
  std::vector<std::string> calls = std::vector<std::string>(kRanks);  // of the collective, by rank
  std::vector<std::string> asked = std::vector<std::string>(kRanks);
};

// Two attempts, as long as all are told; `work` is done in the first.
Outcome run(const std::function<void(FakeDevice&, StepGuard&)>& work) {
  Outcome outcome;
  ThreadGroup group(kRanks, std::chrono::seconds(2));  // for a rank that has left
  group.run([&](Collective& collective) {
    RecordingCollective recording(collective);
    FakeDevice device(recording);
    const auto guard = create_guard(recording, guard_options(kSkipAnything));
    recording.calls.clear();
    const int rank = collective.rank();
    for (int i = 0; i < 2; ++i) {
      guard->begin();
      if (i == 0) work(device, *guard);
      const Decision decision = guard->decide(device);
      outcome.decisions.add(rank, decision);
      if (!decision.agreed) break;  // its process leaves
      guard->finish();
      device.bad = 0;
    }
    outcome.calls[static_cast<std::size_t>(rank)] = recording.calls;
    outcome.asked[static_cast<std::size_t>(rank)] = device.asked;
  });
  return outcome;
}

using Strings = std::vector<std::string>;

TEST(StepGuardDevice, ACleanAttemptIsOneCollectiveAndReadsNothingBack) {
  const Outcome outcome = run([](FakeDevice&, StepGuard&) {});
  EXPECT_EQ(outcome.decisions.agreed_actions(), (Actions{"APPLY", "APPLY"}));
  EXPECT_EQ(outcome.calls, (Strings{"RR", "RR"}));
  EXPECT_EQ(outcome.asked, (Strings{"susu", "susu"}));
}

TEST(StepGuardDevice, WhatItCountsSkipsOnAllAndWhatItMeasuredNamesTheOrigin) {
  const Outcome outcome =
      run([](FakeDevice& device, StepGuard&) { device.bad = device.rank() == 1 ? 3 : 0; });
  EXPECT_EQ(outcome.decisions.agreed_actions(), (Actions{"SKIP", "APPLY"}));
  EXPECT_NE(outcome.decisions.agreed()[0].reason.find("3 non-finite values at backward, first on rank 1"),
            std::string::npos)
      << outcome.decisions.agreed()[0].reason;
  EXPECT_NE(outcome.decisions.agreed()[0].reason.find("weights[104]"), std::string::npos);
  EXPECT_EQ(outcome.calls, (Strings{"RGBR", "RGBR"}));
  EXPECT_EQ(outcome.asked, (Strings{"smsu", "smsu"}));
}

TEST(StepGuardDevice, WhatTheHostObservedCountsToo) {
  const Outcome outcome =
      run([](FakeDevice& device, StepGuard& guard) { guard.observe_loss(device.rank() == 1 ? kNanF : 1); });
  EXPECT_EQ(outcome.decisions.agreed_actions(), (Actions{"SKIP", "APPLY"}));
}

TEST(StepGuardDevice, ASumThatThrowsIsNeverApplied) {
  const Outcome outcome = run([](FakeDevice& device, StepGuard&) { device.sum_throws = device.rank() == 1; });
  const Decision& thrower = outcome.decisions.of(1).at(0);
  EXPECT_EQ(thrower.action, Action::kAbort);
  EXPECT_EQ(thrower.exit_code(), 80);
  EXPECT_EQ(thrower.reason, "the device is on fire");
  EXPECT_FALSE(thrower.agreed);
  EXPECT_EQ(outcome.decisions.of(0).at(0).exit_code(), 84);
  EXPECT_FALSE(outcome.decisions.of(0).at(0).agreed);
}

TEST(StepGuardDevice, MeasurementsThatThrowLeaveTheDecisionAsItIs) {
  const Outcome outcome = run([](FakeDevice& device, StepGuard&) {
    device.bad = device.rank() == 1 ? 3 : 0;
    device.measured_throws = true;
  });
  EXPECT_EQ(outcome.decisions.agreed_actions(), (Actions{"SKIP", "APPLY"}));
  EXPECT_EQ(outcome.calls, (Strings{"RGBR", "RGBR"}));
}

TEST(StepGuardDevice, AnUpdateStatusThatThrowsIsAFailedUpdate) {
  const Outcome outcome =
      run([](FakeDevice& device, StepGuard&) { device.update_throws = device.rank() == 1; });
  EXPECT_EQ(outcome.decisions.agreed_actions(), (Actions{"APPLY", "ABORT 83"}));
  EXPECT_NE(outcome.decisions.agreed()[1].reason.find("no kernel"), std::string::npos);
}

TEST(StepGuardDevice, OfOtherRanksIsRefusedWithoutACollective) {
  const Outcome outcome = run([](FakeDevice& device, StepGuard&) { device.more_ranks = 1; });
  for (int rank = 0; rank < kRanks; ++rank) {
    EXPECT_EQ(outcome.decisions.of(rank).at(0).exit_code(), 64);
    EXPECT_FALSE(outcome.decisions.of(rank).at(0).agreed);
  }
  EXPECT_EQ(outcome.calls, (Strings{"", ""}));
  EXPECT_EQ(outcome.asked, (Strings{"", ""}));
}

}  // namespace
}  // namespace holdfast
