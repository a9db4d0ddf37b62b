// Calls of CUDA and NCCL that fail in an attempt, and ranks that are not the guard's.
#include "coord/events.h"
#include "ranks/collective_decorators.h"
#include "ranks/device_rank.h"

namespace holdfast {
namespace {

using stand_in::Kind;
using CudaAttemptFaults = NcclTest;

// What fails on one rank before the sum: all ranks learn of it, in the same sum.
TEST_F(CudaAttemptFaults, ACudaErrorOnOneRankIsAnErrorOfThatRankOnAll) {
  for (const bool in_scan : {false, true}) {
    stand_in::reset();
    Decisions decisions(2);
    run_devices(2, guard_options(kSkipAnything), [&](DeviceRank& rank) {
      decisions.add(rank.rank, rank.attempt());
      if (rank.rank == 1 && in_scan) stand_in::refuse_launch = true;
      if (rank.rank == 1 && !in_scan) inject_next("cudaMemcpyAsync", rank.rank, Kind::kError);
      decisions.add(rank.rank, rank.attempt());
      EXPECT_EQ(*rank.seen, rank.rank == 1 ? DeviceRank::kNoUpdate : 1u);
      decisions.add(rank.rank, rank.attempt());
      EXPECT_EQ(rank.updates, 2);
    });
    EXPECT_EQ(decisions.agreed_actions(), (Actions{"APPLY", "SKIP", "APPLY"}));
    const std::string& reason = decisions.agreed()[1].reason;
    EXPECT_TRUE(mentions(reason, in_scan ? "cudaLaunchKernel" : "cudaMemcpyAsync")) << reason;
    EXPECT_TRUE(mentions(reason, "rank 1")) << reason;
    expect_clean_end();
  }
}

TEST_F(CudaAttemptFaults, ACudaErrorAbortsWithoutAnUpdateByDefault) {
  Decisions decisions(2);
  run_devices(2, guard_options(), [&](DeviceRank& rank) {
    if (rank.rank == 1) inject_next("cudaMemcpyAsync", rank.rank, Kind::kError);
    decisions.add(rank.rank, rank.attempt());
  });
  EXPECT_EQ(decisions.agreed_actions(), Actions{"ABORT 80"});
}

// Ranks with a deadline that ends what waits for a rank that has failed.
std::vector<std::vector<Decision>> with_deadline(const std::function<void(DeviceRank&)>& break_it,
                                                 int updates_of_rank_0 = 1) {
  std::vector<std::vector<Decision>> decisions(2);
  Bytes id;
  EXPECT_TRUE(NcclCollective::make_id(&id).ok());
  on_threads(2, [&](int r) {
    std::unique_ptr<NcclCollective> collective;
    const NcclOptions options = nccl_options(std::chrono::seconds(3));
    ASSERT_TRUE(NcclCollective::create(id, r, 2, r, options, &collective).ok());
    DeviceRank rank(*collective, *collective, guard_options());
    auto& mine = decisions[static_cast<std::size_t>(r)];
    for (int i = 0; i < 2; ++i) {
      mine.push_back(rank.attempt([&] {
        if (i == 1) break_it(rank);
      }));
    }
    Record record;
    const int sums = stand_in::calls(r, "ncclAllReduce");
    EXPECT_EQ(rank.device->sum(&record).code(), StatusCode::kRankMissing) << "for good";
    EXPECT_EQ(stand_in::calls(r, "ncclAllReduce"), rank.updates == 1 ? sums : sums + 1);
    EXPECT_EQ(rank.updates, r == 0 ? updates_of_rank_0 : 1);
  });
  return decisions;
}

TEST_F(CudaAttemptFaults, ASumThatFailsOnOneRankIsAppliedOnNone) {
  struct Case {
    const char* function;
    Kind kind;
  };
  for (const Case& one :
       {Case{"ncclAllReduce", Kind::kError}, Case{"ncclAllReduce", Kind::kNeverCompletes},
        Case{"launch_publish", Kind::kError}, Case{"ncclCommGetAsyncError", Kind::kAsyncError}}) {
    SCOPED_TRACE(one.function);
    stand_in::reset();
    // Else the other's sum is complete.
    const bool on_both = one.kind == Kind::kNeverCompletes || one.function == std::string("launch_publish");
    const auto decisions = with_deadline([&](DeviceRank& rank) {
      if (rank.rank == 1 || on_both) inject_next(one.function, rank.rank, one.kind);
      if (one.kind == Kind::kAsyncError && rank.rank == 0)
        inject_next("ncclAllReduce", rank.rank, Kind::kError);
    });
    for (const auto& mine : decisions) {
      ASSERT_EQ(mine.size(), 2u);
      EXPECT_TRUE(mine[0].apply());
      EXPECT_EQ(mine[1].action, Action::kAbort);
      EXPECT_EQ(mine[1].code, StatusCode::kRankMissing) << mine[1].reason;
      EXPECT_FALSE(mine[1].agreed);
    }
    expect_clean_end();
  }
}

// Nothing can be done for the one that has it: what it applied is void. On each the device does as its host.
TEST_F(CudaAttemptFaults, ASumThatOneRankDoesNotGetIsNotAppliedThere) {
  const auto break_it = [](DeviceRank& rank) {
    if (rank.rank == 1) inject_next("ncclAllReduce", rank.rank, Kind::kNeverCompletes);
  };
  const auto decisions = with_deadline(break_it, 2);
  EXPECT_TRUE(decisions[0].at(1).apply());
  EXPECT_EQ(decisions[1].at(1).exit_code(), 84);
}

// Its graph may hold the gradients' sum, too, in which the others wait: it cannot join them in ours alone.
TEST_F(CudaAttemptFaults, AGraphThatOneRankCannotLaunchEndsTheAttemptsOfAll) {
  const auto break_it = [](DeviceRank& rank) {
    if (rank.rank == 1) rank.device->replay([] { return Status::internal("cudaGraphLaunch: refused"); });
  };
  const auto decisions = with_deadline(break_it);
  for (const std::vector<Decision>& mine : decisions) {
    EXPECT_EQ(mine.at(1).exit_code(), 84);
    EXPECT_FALSE(mine.at(1).agreed);
  }
  EXPECT_TRUE(mentions(decisions[1].at(1).reason, "refused")) << decisions[1].at(1).reason;
  expect_clean_end();
}

// Whoever aborts, such as a watchdog, while the host is elsewhere.
TEST_F(CudaAttemptFaults, ACommunicatorThatWasAbortedRaisesTheFlag) {
  run_devices(1, guard_options(), [](DeviceRank& rank) {
    EXPECT_TRUE(rank.attempt().apply());
    const Decision decision = rank.attempt([&] { rank.collective.abort(); });
    EXPECT_EQ(decision.exit_code(), 84);
    EXPECT_FALSE(decision.agreed);
    EXPECT_EQ(*rank.seen, DeviceRank::kNoUpdate);
    // Nor is a graph launched that would use it.
    int launches = 0;
    rank.device->replay([&] { return ++launches, Status(); });
    Record record;
    EXPECT_EQ(rank.device->sum(&record).code(), StatusCode::kRankMissing);
    EXPECT_EQ(launches, 0);
  });
  expect_clean_end();
}

// The others have applied theirs by then.
TEST_F(CudaAttemptFaults, AnUpdateThatCouldNotBeEnqueuedIsAFailedUpdate) {
  for (const bool throws : {false, true}) {
    stand_in::reset();
    Decisions decisions(2);
    run_devices(2, guard_options(kSkipAnything), [&](DeviceRank& rank) {
      if (rank.rank == 1) {
        rank.fail_to_enqueue = [&]() -> Status {
          if (throws) throw std::runtime_error("no such kernel");
          return Status::internal("no such kernel");
        };
      }
      decisions.add(rank.rank, rank.attempt());
      rank.fail_to_enqueue = nullptr;
      decisions.add(rank.rank, rank.attempt());
    });
    EXPECT_EQ(decisions.agreed_actions(), (Actions{"APPLY", "ABORT 83"}));
    EXPECT_TRUE(mentions(decisions.agreed()[1].reason, "no such kernel")) << decisions.agreed()[1].reason;
    EXPECT_TRUE(mentions(decisions.agreed()[1].reason, "rank 1")) << decisions.agreed()[1].reason;
    expect_clean_end();
  }
}

// Behind a bad sum there is nothing to update, so it harms nobody.
TEST_F(CudaAttemptFaults, AnUpdateThatCouldNotBeEnqueuedIsForgottenWithASkip) {
  Decisions decisions(2);
  run_devices(2, guard_options(kSkipAnything), [&](DeviceRank& rank) {
    if (rank.rank == 1) rank.fail_to_enqueue = [] { return Status::internal("no such kernel"); };
    rank.gradient[1] = kNanF;
    decisions.add(rank.rank, rank.attempt());
    rank.fail_to_enqueue = nullptr;
    rank.gradient[1] = 1;
    decisions.add(rank.rank, rank.attempt());
  });
  EXPECT_EQ(decisions.agreed_actions(), (Actions{"SKIP", "APPLY"}));
}

TEST_F(CudaAttemptFaults, WhatCannotBeReadBackIsMissingFromTheRecordAndNothingElse) {
  Decisions decisions(2);
  run_devices(2, guard_options(kSkipAnything), [&](DeviceRank& rank) {
    if (rank.rank == 1) {
      rank.gradient[1] = kNanF;
      inject_next("cudaMemcpyAsync", rank.rank, Kind::kError,
                  2);  // behind the record, and what the update does
    }
    decisions.add(rank.rank, rank.attempt());
    rank.gradient[1] = 1;
    decisions.add(rank.rank, rank.attempt());
  });
  EXPECT_EQ(decisions.agreed_actions(), (Actions{"SKIP", "APPLY"}));
  EXPECT_TRUE(mentions(decisions.agreed()[0].reason, "1 non-finite value at backward"))
      << decisions.agreed()[0].reason;
  EXPECT_FALSE(mentions(decisions.agreed()[0].reason, "weights")) << decisions.agreed()[0].reason;
  expect_clean_end();
}

// Each rank's device would find itself alone and well, whatever the others say.
TEST_F(CudaAttemptFaults, ADeviceOfOtherRanksThanTheGuardsIsRefusedBeforeAnythingIsEnqueued) {
  ThreadGroup(2).run([&](Collective& group) {
    Bytes id;
    ASSERT_TRUE(NcclCollective::make_id(&id).ok());
    std::unique_ptr<NcclCollective> alone;
    ASSERT_TRUE(NcclCollective::create(id, 0, 1, 0, nccl_options(), &alone).ok());
    DeviceRank rank(*alone, group, guard_options());
    const int sums = stand_in::calls(0, "launch_publish");
    const Decision decision = rank.attempt();
    EXPECT_EQ(decision.exit_code(), 64) << decision.reason;
    EXPECT_FALSE(decision.agreed);
    EXPECT_EQ(stand_in::calls(0, "launch_publish"), sums);
    EXPECT_EQ(*rank.seen, DeviceRank::kNoUpdate);
  });
}

TEST_F(CudaAttemptFaults, AnOrderToApplyABadAttemptIsNotFollowed) {
  run_nccl(2, [&](NcclCollective& collective) {
    CorruptingCollective corrupting(collective);
    DeviceRank rank(collective, corrupting, guard_options(kSkipAnything));
    corrupting.change_broadcast = [](Bytes& bytes) {
      bytes = encode_decision({Action::kApply, StatusCode::kOk, {}});
    };
    if (rank.rank == 1) rank.gradient[1] = kNanF;
    const Decision decision = rank.attempt();
    EXPECT_EQ(decision.action, Action::kAbort);
    EXPECT_FALSE(decision.agreed);
  });
  expect_clean_end();
}

}  // namespace
}  // namespace holdfast
