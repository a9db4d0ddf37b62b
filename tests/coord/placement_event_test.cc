// Which hardware an incident began on, and when a device is called suspect.
#include <gtest/gtest.h>

#include "coord/events.h"
#include "coord/sample_incident.h"
#include "holdfast/coord/coordinator.h"
#include "holdfast/coord/policy.h"
#include "holdfast/coord/policy.pb.h"

namespace holdfast {
namespace {

// Four ranks on two hosts; those of node1 have a GPU.
Topology two_hosts() {
  std::vector<RankPlacement> placements;
  for (int r = 0; r < 4; ++r) {
    RankPlacement p;
    p.rank = r;
    p.host = r < 2 ? "node0" : "node1";
    p.pid = 500 + r;
    p.local_rank = r % 2;
    p.cpus = "0-3";
    p.numa = "0";
    if (r >= 2) {
      p.gpu_uuid = "GPU-" + std::to_string(r);
      p.gpu_pci = "0000:1" + std::to_string(r) + ":00.0";
    }
    p.axes = {{"dp", r / 2}, {"tp", r % 2}};
    placements.push_back(p);
  }
  return Topology(std::move(placements));
}

class PlacementEvent : public testing::Test {
 protected:
  void start(const std::string& policy_text = "", Topology topology = two_hosts()) {
    Policy policy;
    ASSERT_TRUE(parse_policy(policy_text, &policy).ok());
    const Status status = Coordinator::create(policy, run_dir(), &rank0_);
    ASSERT_TRUE(status.ok()) << status.to_string();
    rank0_->run_started(1, std::move(topology));
  }
  std::string run_dir() const { return temp_ / "run"; }

  // The origins on record after one more incident.
  Json origins_of(const Incident& incident) {
    rank0_->handle(incident);
    return read_events(run_dir()).back()["origins"];
  }
  bool suspect(const Incident& incident) {
    return origins_of(incident).at(0)["hardware_suspect"].get<bool>();
  }

  const TempDir temp_;
  std::unique_ptr<Coordinator> rank0_;
};

Incident at_stage(Stage stage, const std::vector<int>& ranks) {
  Incident incident = sample_incident(4, [&](Record& sum) { sum.add_bad(stage, {ranks.size(), 0, 0}); });
  for (const int r : ranks) incident.views.push_back(sample_view(r, {{stage, "w", 0, {1, 0, 0}, 0}}));
  return incident;
}

TEST_F(PlacementEvent, AnOriginIsOnRecordWithItsDeviceAndWhereItRuns) {
  start();
  const Json origin = origins_of(one_nan(2)).at(0);
  EXPECT_EQ(origin["rank"], 2);
  EXPECT_EQ(origin["device"], "node1/GPU-2");
  EXPECT_EQ(origin["hardware_suspect"], false);
  EXPECT_EQ(origin["placement"], Json::parse(R"({"pid": 502, "local_rank": 0, "cpus": "0-3", "numa": "0",
    "gpu_uuid": "GPU-2", "gpu_pci": "0000:12:00.0", "axes": {"dp": 1, "tp": 0}})"));
}

TEST_F(PlacementEvent, WithoutAGpuTheDeviceIsTheSlot) {
  start();
  EXPECT_EQ(origins_of(one_nan(1)).at(0)["device"], "node0/slot 1");
}

TEST_F(PlacementEvent, ARankWhosePlaceIsNotKnownHasNone) {
  start("", Topology());
  const Json origin = origins_of(one_nan(2)).at(0);
  for (const char* field : {"device", "hardware_suspect", "placement"})
    EXPECT_FALSE(origin.contains(field)) << field;
}

TEST_F(PlacementEvent, TheStartOfTheRunHasTheMapAndTheNumberOfRanks) {
  start();
  const Json event = read_events(run_dir()).at(0);
  EXPECT_EQ(event["event"], "run_started");
  EXPECT_EQ(event["ranks"], 4);
  EXPECT_EQ(event["topology"], two_hosts().map());
}

// Field case 33: the third incident on one device says so, and those after it.
TEST_F(PlacementEvent, TheThirdIncidentOfADeviceMakesItAHardwareSuspect) {
  start();
  EXPECT_FALSE(suspect(one_nan(2)));
  EXPECT_FALSE(suspect(one_nan(2)));
  EXPECT_TRUE(suspect(one_nan(2)));
  EXPECT_TRUE(suspect(one_nan(2)));
  EXPECT_FALSE(suspect(one_nan(3)));  // its neighbour is not
}

TEST_F(PlacementEvent, ThePolicySaysHowMany) {
  start("suspect_after_incidents: 1");
  EXPECT_TRUE(suspect(one_nan(0)));
}

TEST_F(PlacementEvent, OriginsOnSeveralDevicesPointAtNone) {
  start("suspect_after_incidents: 2");
  for (int i = 0; i < 5; ++i) {
    const Json origins = origins_of(at_stage(Stage::kBackward, {1, 2}));
    ASSERT_EQ(origins.size(), 2u);
    EXPECT_EQ(origins[0]["hardware_suspect"], false);
    EXPECT_EQ(origins[1]["hardware_suspect"], false);
  }
}

// The same sum is on every rank: a share of it says nothing of the device that scanned it.
TEST_F(PlacementEvent, TheReductionNeverCountsAgainstADevice) {
  start("suspect_after_incidents: 1");
  for (int i = 0; i < 5; ++i) EXPECT_FALSE(suspect(at_stage(Stage::kReduction, {2})));
  EXPECT_TRUE(suspect(at_stage(Stage::kForward, {2})));
}

TEST_F(PlacementEvent, AnIncidentThatEndsTheRunIsMarkedToo) {
  start("suspect_after_incidents: 2 max_total_skips: 1");
  EXPECT_FALSE(suspect(one_nan(3)));
  EXPECT_TRUE(suspect(one_nan(3)));
  EXPECT_EQ(read_events(run_dir()).back()["event"], "aborted");
}

TEST_F(PlacementEvent, AnExceptionCountsAgainstNoDevice) {
  start("suspect_after_incidents: 2 on_error: SKIP");
  for (int i = 0; i < 5; ++i) rank0_->handle(exception_on(2, "x"));
  EXPECT_FALSE(suspect(one_nan(2)));
}

}  // namespace
}  // namespace holdfast
