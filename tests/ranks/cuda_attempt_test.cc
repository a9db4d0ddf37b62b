// What the guard decides is what the device does, whoever finds what.
#include "coord/events.h"
#include "ranks/device_rank.h"

namespace holdfast {
namespace {

class CudaAttemptOnRanks : public testing::TestWithParam<int> {
 protected:
  void SetUp() override { stand_in::reset(); }
};
INSTANTIATE_TEST_SUITE_P(Ranks, CudaAttemptOnRanks, testing::Values(1, 2, 4));

TEST_P(CudaAttemptOnRanks, ACleanAttemptIsAppliedWithOneCollective) {
  const int ranks = GetParam();
  Decisions decisions(ranks);
  run_devices(ranks, guard_options(), [&](DeviceRank& rank) {
    const auto before = stand_in::calls(rank.rank);
    for (int i = 0; i < 3; ++i) decisions.add(rank.rank, rank.attempt());
    auto after = stand_in::calls(rank.rank);
    EXPECT_EQ(after["ncclAllReduce"], before.at("ncclAllReduce") + 3);
    EXPECT_EQ(after["ncclAllGather"], before.at("ncclAllGather"));
    EXPECT_EQ(after["ncclBroadcast"], before.at("ncclBroadcast"));
    EXPECT_EQ(rank.updates, 3);
    EXPECT_TRUE(rank.guard->close().apply());
  });
  EXPECT_EQ(decisions.agreed_actions(), (Actions{"APPLY", "APPLY", "APPLY"}));
  expect_clean_end();
}

TEST_P(CudaAttemptOnRanks, ANanOnAnyRanksDeviceSkipsOnAllAndIsOnRecord) {
  const int ranks = GetParam();
  const TempDir temp;
  Decisions decisions(ranks);
  run_devices(ranks, guard_options(kSkipAnything, temp / "run"), [&](DeviceRank& rank) {
    for (int bad = 0; bad < ranks; ++bad) {
      if (rank.rank == bad) rank.gradient[static_cast<std::size_t>(40 + bad)] = kNanF;
      decisions.add(rank.rank, rank.attempt());
      EXPECT_EQ(*rank.seen, 1u);
      rank.gradient.assign(100, 1.0f);
      decisions.add(rank.rank, rank.attempt());
    }
    EXPECT_EQ(rank.updates, ranks);
  });
  const std::vector<Json> events = events_named(temp / "run", "attempt_skipped");
  ASSERT_EQ(events.size(), static_cast<std::size_t>(ranks));
  for (std::size_t i = 0; i < events.size(); ++i) {
    EXPECT_EQ(decisions.agreed()[2 * i].action, Action::kSkip);
    EXPECT_TRUE(decisions.agreed()[2 * i + 1].apply());
    EXPECT_EQ(events[i]["stage"], "backward");
    EXPECT_EQ(events[i]["nan"], 1);
    ASSERT_EQ(events[i]["origins"].size(), 1u);
    const Json& origin = events[i]["origins"][0];
    EXPECT_EQ(origin["rank"], i);
    EXPECT_EQ(origin["tensor"], "weights");
    EXPECT_EQ(origin["index"], DeviceRank::kOffset + 40 + static_cast<int>(i));
  }
  expect_clean_end();
}

// ---- what the host alone knows, or rank 0 alone decides. DeviceRank checks that the device obeys.

struct Reason {
  const char* name;
  const char* policy;
  Actions actions;
  std::function<void(DeviceRank&, int attempt)> work;
  std::function<void(DeviceRank&, int attempt)> update = [](DeviceRank&, int) {};
};

void on_rank_1(DeviceRank& rank, const std::function<void(StepGuard&)>& work) {
  if (rank.rank == 1) work(*rank.guard);
}

const float kSpoilt[] = {1, kInfF, 3};
float running_mean[2][3];

const Reason kReasons[] = {
    {"an exception, to be skipped",
     "on_error: SKIP",
     {"SKIP", "APPLY"},
     [](DeviceRank& rank, int attempt) {
       if (attempt == 0) on_rank_1(rank, [](StepGuard& guard) { guard.report_error(Stage::kForward, "x"); });
     }},
    {"an exception",
     "",
     {"ABORT 80"},
     [](DeviceRank& rank, int) {
       on_rank_1(rank, [](StepGuard& guard) { guard.report_error(Stage::kForward, "x"); });
     }},
    {"a value in the host's memory",
     "",
     {"SKIP", "APPLY"},
     [](DeviceRank& rank, int attempt) {
       if (attempt == 0) on_rank_1(rank, [](StepGuard& guard) { guard.observe_loss(kNanF); });
     }},
    {"the first of an expensive run",
     "on_first: ABORT",
     {"ABORT 81"},
     [](DeviceRank& rank, int) { rank.gradient[3] = kNanF; }},
    {"the budget",
     "max_total_skips: 1",
     {"SKIP", "ABORT 81"},
     [](DeviceRank& rank, int) { rank.gradient[3] = kNanF; }},
    {"a stop",
     "",
     {"APPLY", "STOP 86"},
     [](DeviceRank& rank, int attempt) {
       if (attempt == 1) on_rank_1(rank, [](StepGuard& guard) { guard.request_stop(); });
     }},
    {"a rule",
     "",
     {"SKIP", "APPLY"},
     [](DeviceRank& rank, int attempt) {
       if (attempt == 1) return;
       // In rank 0's share, and seen by rank 1.
       const std::vector<float> sum = {rank.rank == 1 ? kNanF : 1, 1, 1, 1};
       const BucketSlice layout[] = {{"all", 0, 4}};
       const Probe probes[] = {scan(TensorView::of(sum))};
       rank.guard->observe_reduced(TensorView::of(sum), layout, probes);
     }},
    {"a protected buffer",
     "",
     {"APPLY", "SKIP"},
     [](DeviceRank& rank, int attempt) {
       float* buffer = running_mean[rank.rank];
       if (attempt == 0) {
         std::fill(buffer, buffer + 3, 1.0f);
         rank.guard->protect("running_mean", buffer, DType::kFloat32, 3);
       } else if (rank.rank == 1) {
         std::copy(kSpoilt, kSpoilt + 3, buffer);
       }
     }},
    {"an attempt that the others are not at",
     "",
     {"APPLY", "ABORT 83"},
     [](DeviceRank& rank, int attempt) {
       if (attempt != 1) return;
       on_rank_1(rank, [](StepGuard& guard) {
         guard.finish();
         guard.begin();
       });
     }},
    {"an update that failed on the host",
     "on_error: SKIP",
     {"APPLY", "ABORT 83"},
     [](DeviceRank&, int) {},
     [](DeviceRank& rank, int) {
       if (rank.rank == 1) throw std::runtime_error("x");
     }},
    {"a value that the update wrote",
     "",
     {"APPLY", "ABORT 85"},
     [](DeviceRank&, int) {},
     [](DeviceRank& rank, int) { rank.guard->observe_written("weights", TensorView::of(kSpoilt)); }},
    {"the end of the data",
     "",
     {"APPLY", "APPLY"},
     [](DeviceRank& rank, int attempt) {
       if (attempt == 0) on_rank_1(rank, [](StepGuard& guard) { guard.no_next_batch(); });
     }},
};

using CudaAttemptTest = NcclTest;

TEST_F(CudaAttemptTest, WhateverTheHostDecidesTheDeviceDoes) {
  for (const Reason& reason : kReasons) {
    SCOPED_TRACE(reason.name);
    stand_in::reset();
    Decisions decisions(2);
    run_devices(2, guard_options(reason.policy), [&](DeviceRank& rank) {
      for (std::size_t i = 0; i < reason.actions.size(); ++i) {
        const int attempt = static_cast<int>(i);
        decisions.add(rank.rank, rank.attempt([&] { reason.work(rank, attempt); },
                                              [&] { reason.update(rank, attempt); }));
      }
    });
    EXPECT_EQ(decisions.agreed_actions(), reason.actions);
    expect_clean_end();
  }
}

TEST_F(CudaAttemptTest, AGradientOverflowIsSkippedAndHalvesTheLossScale) {
  GuardOptions options = guard_options();
  options.loss_scaling = true;
  Decisions decisions(2);
  run_devices(2, options, [&](DeviceRank& rank) {
    if (rank.rank == 1) rank.gradient[9] = kInfF;
    decisions.add(rank.rank, rank.attempt());
    EXPECT_EQ(rank.guard->loss_scale(), 32768);
  });
  EXPECT_EQ(decisions.agreed_actions(), Actions{"SKIP"});
}

// Replicas that differ; and what an update spoilt, with a checkpoint to go back to.
TEST_F(CudaAttemptTest, ARollbackAndADivergenceLeaveTheUpdateOut) {
  for (const bool diverge : {false, true}) {
    stand_in::reset();
    const TempDir temp;
    GuardOptions options = guard_options("", temp / "run");
    options.checkpoints.interval_attempts = 100;
    Decisions decisions(2);
    run_devices(2, options, [&](DeviceRank& rank) {
      std::vector<float> parameters = {1, 2, diverge && rank.rank == 1 ? 4.0f : 3.0f};
      TrainingState state;
      state.add(StateTensor{.name = "weights", .data = parameters.data(), .shape = {3}});
      EXPECT_TRUE(rank.guard->register_state(state).ok());
      const auto spoil = [&] { rank.guard->observe_written("weights", TensorView::of(kSpoilt)); };
      decisions.add(rank.rank, rank.attempt([] {}, spoil));
      if (diverge) return;
      decisions.add(rank.rank, rank.attempt());
      EXPECT_EQ(rank.updates, 1);
      decisions.add(rank.rank, rank.attempt());
    });
    EXPECT_EQ(decisions.agreed_actions(),
              diverge ? Actions{"ABORT 83"} : (Actions{"APPLY", "ROLL_BACK", "APPLY"}));
    expect_clean_end();
  }
}

TEST_F(CudaAttemptTest, AScanThatWasNotEnqueuedIsAnErrorOfItsRank) {
  Decisions decisions(2);
  run_devices(2, guard_options(kSkipAnything), [&](DeviceRank& rank) {
    rank.scans = rank.rank != 1;
    decisions.add(rank.rank, rank.attempt());
    rank.scans = true;
    decisions.add(rank.rank, rank.attempt());
    // A rank that has failed before it came to its scan says so, and nothing of what the scan saw before.
    rank.gradient[0] = rank.rank == 1 ? kNanF : 1;
    decisions.add(rank.rank, rank.attempt());
    rank.scans = rank.rank != 1;
    decisions.add(rank.rank, rank.attempt([&] {
      on_rank_1(rank, [](StepGuard& guard) { guard.report_error(Stage::kForward, "oops"); });
    }));
  });
  EXPECT_EQ(decisions.agreed_actions(), (Actions{"SKIP", "APPLY", "SKIP", "SKIP"}));
  EXPECT_TRUE(mentions(decisions.agreed()[0].reason, "the scan of finite was not enqueued"))
      << decisions.agreed()[0].reason;
  EXPECT_TRUE(mentions(decisions.agreed()[3].reason, "oops")) << decisions.agreed()[3].reason;
  EXPECT_FALSE(mentions(decisions.agreed()[3].reason, "weights")) << decisions.agreed()[3].reason;
  expect_clean_end();
}

// The graph that is replayed holds the scans.
TEST_F(CudaAttemptTest, AReplayIsSummedAsWhatItWasCapturedFrom) {
  Decisions decisions(2);
  run_devices(2, guard_options(kSkipAnything), [&](DeviceRank& rank) {
    rank.scans = false;
    rank.device->replay([&] {
      rank.device->scan(rank.scan);
      return rank.device->enqueue();
    });
    decisions.add(rank.rank, rank.attempt());
    if (rank.rank == 1) rank.gradient[7] = kNanF;
    decisions.add(rank.rank, rank.attempt());
    rank.gradient[7] = 1;
    decisions.add(rank.rank, rank.attempt());
  });
  EXPECT_EQ(decisions.agreed_actions(), (Actions{"APPLY", "SKIP", "APPLY"}));
  EXPECT_TRUE(mentions(decisions.agreed()[1].reason, "weights[1007]")) << decisions.agreed()[1].reason;
  expect_clean_end();
}

// A graph that lacks a scan, or the update, would be clean, or leave the update out, in each of its replays.
TEST_F(CudaAttemptTest, WhatCannotBeCapturedWholeIsRefused) {
  run_devices(1, guard_options(), [](DeviceRank& rank) {
    std::size_t second = 0;
    const CudaTensor tensor[] = {{"late", TensorView::of(rank.others)}};
    ASSERT_TRUE(rank.device->add_scan(Stage::kReduction, tensor, &second).ok());
    const int sums = stand_in::calls(0, "launch_publish");
    rank.device->scan(rank.scan);
    const Status missing = rank.device->enqueue();
    EXPECT_TRUE(mentions(missing.message(), "the scan of late was not enqueued")) << missing.to_string();
    EXPECT_EQ(stand_in::calls(0, "launch_publish"), sums);
    rank.device->scan(rank.scan);
    EXPECT_FALSE(rank.device->enqueue().ok()) << "what was captured before counts no more";
    rank.device->scan(rank.scan);
    rank.device->scan(second);
    rank.fail_to_enqueue = [] { return Status::internal("no such kernel"); };
    EXPECT_TRUE(mentions(rank.device->enqueue().message(), "no such kernel"));
  });
}

}  // namespace
}  // namespace holdfast
