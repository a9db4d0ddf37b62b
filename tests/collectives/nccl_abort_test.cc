// An abort from another thread, as the watchdog makes it.
#include <atomic>
#include <stdexcept>

#include "collectives/conformance.h"
#include "collectives/nccl_ranks.h"

namespace holdfast {
namespace {

using stand_in::Kind;
using std::chrono::milliseconds;

using NcclAbort = NcclTest;

using Clock = std::chrono::steady_clock;

struct Phase {
  const char* name;
  const char* function;  // which, once rank 0 has called it, has rank 0 waiting
  Status (*on_rank_0)(NcclCollective&);
  Status (*on_rank_1)(NcclCollective&);
};

Status nothing(NcclCollective&) { return Status(); }
Status reduce(NcclCollective& collective) {
  Record record;
  return collective.reduce(record);
}
Status gather(NcclCollective& collective) {
  std::vector<Bytes> all;
  return collective.gather("mine", &all);
}
Status broadcast(NcclCollective& collective) {
  Bytes bytes = "mine";
  return collective.broadcast(&bytes);
}
Status wait(NcclCollective& collective) {
  Record sum;
  Status s =
      collective.reduce_on(stand_in::make_stream(collective.rank()), stand_in::make_lanes(collective.rank()));
  return s.ok() ? collective.wait(&sum) : s;
}

TEST_F(NcclAbort, EndsEveryPhaseInAMoment) {
  const Phase phases[] = {{"reduce", "ncclAllReduce", reduce, nothing},
                          {"gather of sizes", "ncclAllGather", gather, nothing},
                          {"gather of bytes", "ncclRecv", gather, gather},
                          {"broadcast", "ncclBroadcast", broadcast, nothing},
                          {"wait", "launch_publish", wait, nothing}};
  for (const Phase& phase : phases) {
    SCOPED_TRACE(phase.name);
    stand_in::reset();
    Bytes id;
    ASSERT_TRUE(NcclCollective::make_id(&id).ok());
    std::atomic<bool> over{false};
    on_threads(2, [&](int rank) {
      std::unique_ptr<NcclCollective> collective;
      ASSERT_TRUE(NcclCollective::create(id, rank, 2, rank, nccl_options(), &collective).ok());
      if (rank == 1) {
        // What it sends does not arrive.
        stand_in::inject({"ncclSend", 1, 1, Kind::kNeverCompletes});
        std::jthread watchdog([&] {
          soon([&] { return over.load(); });
          collective->abort();
        });
        static_cast<void>(phase.on_rank_1(*collective));
        return;
      }
      const int before = stand_in::calls(0, phase.function);
      Clock::time_point aborted;
      std::jthread watchdog([&] {
        EXPECT_TRUE(soon([&] { return stand_in::calls(0, phase.function) > before; }));
        std::this_thread::sleep_for(milliseconds(5));
        aborted = Clock::now();
        collective->abort();
        collective->abort();
      });
      const Status status = phase.on_rank_0(*collective);
      const auto end = Clock::now();
      watchdog.join();
      EXPECT_EQ(status.code(), StatusCode::kRankMissing);
      EXPECT_NE(status.message().find("the communicator was aborted"), std::string::npos) << status.message();
      EXPECT_LT(end - aborted, std::chrono::seconds(5));
      EXPECT_EQ(reduce(*collective).to_string(), status.to_string());
      EXPECT_EQ(stand_in::calls(0, "ncclCommAbort"), 1);
      over = true;
    });
    expect_clean_end();
  }
}

TEST_F(NcclAbort, EndsACallThatIsInProgress) {
  run_nccl(1, [](NcclCollective& collective) {
    stand_in::answer_late(1 << 30);
    const int before = stand_in::calls(0, "ncclAllReduce");
    std::jthread watchdog([&] {
      EXPECT_TRUE(soon([&] { return stand_in::calls(0, "ncclAllReduce") > before; }));
      collective.abort();
    });
    EXPECT_EQ(reduce(collective).code(), StatusCode::kRankMissing);
  });
  EXPECT_EQ(stand_in::calls(0, "ncclCommAbort"), 1);
  expect_clean_end();
}

// The threads race: whatever the outcome, no call is made on a communicator that is being aborted.
TEST_F(NcclAbort, NeverMeetsACallInTheMiddle) {
  for (int round = 0; round < 60; ++round) {
    stand_in::reset();
    run_nccl(1, [&](NcclCollective& collective) {
      std::jthread watchdog([&] {
        std::this_thread::sleep_for(std::chrono::microseconds(37 * round));
        collective.abort();
      });
      for (int i = 0; i < 1'000'000; ++i) {
        Record record = conformance::contribution(0, i);
        if (!collective.reduce(record).ok()) break;
        EXPECT_EQ(record, conformance::contribution(0, i));
      }
    });
    EXPECT_EQ(stand_in::calls(0, "ncclCommAbort"), 1);
    expect_clean_end();
  }
}

TEST_F(NcclAbort, BetweenCollectivesMakesTheNextOneFail) {
  run_nccl(1, [](NcclCollective& collective) {
    std::jthread([&] { collective.abort(); }).join();
    EXPECT_EQ(reduce(collective).code(), StatusCode::kRankMissing);
  });
  EXPECT_EQ(stand_in::calls(0, "ncclCommAbort"), 1);
  expect_clean_end();
}

// A graph that is being launched holds kernels of the communicator.
TEST_F(NcclAbort, WaitsForALaunchAndThereIsNoneAfterwards) {
  run_nccl(1, [](NcclCollective& collective) {
    std::atomic<bool> begun{false};
    std::jthread watchdog([&] {
      EXPECT_TRUE(soon([&] { return begun.load(); }));
      collective.abort();
    });
    int aborts_meanwhile = -1;
    EXPECT_EQ(collective
                  .launch([&] {
                    begun = true;
                    std::this_thread::sleep_for(milliseconds(100));
                    aborts_meanwhile = stand_in::calls(0, "ncclCommAbort");
                    return Status();
                  })
                  .code(),
              StatusCode::kRankMissing);
    EXPECT_EQ(aborts_meanwhile, 0);
    watchdog.join();
    EXPECT_EQ(stand_in::calls(0, "ncclCommAbort"), 1);
    bool launched = false;
    EXPECT_EQ(collective.launch([&] { return launched = true, Status(); }).code(), StatusCode::kRankMissing);
    EXPECT_FALSE(launched);
  });
  expect_clean_end();
}

TEST_F(NcclAbort, ALaunchThatThrowsLeavesTheCommunicatorUsable) {
  run_nccl(1, [](NcclCollective& collective) {
    EXPECT_THROW(static_cast<void>(collective.launch([]() -> Status { throw std::runtime_error("no"); })),
                 std::runtime_error);
    EXPECT_TRUE(reduce(collective).ok());
  });
  EXPECT_EQ(stand_in::calls(0, "ncclCommAbort"), 0);
  expect_clean_end();
}

// What is left on the stream runs to its end, and leaves the optimizer out.
TEST_F(NcclAbort, LeavesTheSkipFlagSetBehindASumThatWasCutShort) {
  Bytes id;
  ASSERT_TRUE(NcclCollective::make_id(&id).ok());
  on_threads(2, [&](int rank) {
    std::unique_ptr<NcclCollective> collective;
    ASSERT_TRUE(NcclCollective::create(id, rank, 2, rank, nccl_options(), &collective).ok());
    const cudaStream_t stream = stand_in::make_stream(rank);
    std::uint64_t* lanes = stand_in::make_lanes(rank);
    Record sum;
    lanes[Record::kParticipantsLane] = 1;
    ASSERT_TRUE(collective->reduce_on(stream, lanes).ok());
    ASSERT_TRUE(collective->wait(&sum).ok());
    EXPECT_EQ(*collective->device_skip_flag(), 0u);
    ASSERT_TRUE(reduce(*collective).ok());
    if (rank == 1) return;
    lanes[Record::kParticipantsLane] = 2;  // alone it looks like the sum of both
    ASSERT_TRUE(collective->reduce_on(stream, lanes).ok());
    collective->abort();
    stand_in::drain();
    EXPECT_EQ(lanes[Record::kParticipantsLane], 2u);
    EXPECT_EQ(*collective->device_skip_flag(), 1u);
    EXPECT_EQ(collective->wait(&sum).code(), StatusCode::kRankMissing);
  });
  expect_clean_end();
}

TEST_F(NcclAbort, ThatDoesNotReturnHoldsUpNobody) {
  stand_in::inject({"ncclCommAbort", 0, 1, Kind::kNeverReturns});
  Bytes id;
  ASSERT_TRUE(NcclCollective::make_id(&id).ok());
  std::unique_ptr<NcclCollective> collective;
  ASSERT_TRUE(NcclCollective::create(id, 0, 1, 0, nccl_options(), &collective).ok());
  auto start = Clock::now();
  collective->abort();
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(8));
  start = Clock::now();
  collective.reset();
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(8));
  // Memory of a device that may still be at work is not touched.
  EXPECT_EQ(stand_in::calls(0, "cudaFree"), 0);
  EXPECT_EQ(stand_in::held(), 6u);
  stand_in::release();
  EXPECT_TRUE(soon([] { return stand_in::held() < 6u; }));
  EXPECT_EQ(stand_in::misuse(), std::vector<std::string>());
}

// A rank that is gone for good does not hold up the end of those who are done.
TEST_F(NcclAbort, IsWhatTheDestructorDoesWhenTheOthersDoNotEnd) {
  Bytes id;
  ASSERT_TRUE(NcclCollective::make_id(&id).ok());
  std::unique_ptr<NcclCollective> forgotten;
  on_threads(2, [&](int rank) {
    std::unique_ptr<NcclCollective> collective;
    ASSERT_TRUE(
        NcclCollective::create(id, rank, 2, rank, nccl_options(milliseconds(3000)), &collective).ok());
    if (rank == 1) {
      forgotten = std::move(collective);
      return;
    }
    const auto start = Clock::now();
    collective.reset();
    EXPECT_LT(Clock::now() - start, std::chrono::seconds(8));
    EXPECT_EQ(stand_in::calls(0, "ncclCommAbort"), 1);
    EXPECT_EQ(stand_in::calls(0, "ncclCommDestroy"), 0);
  });
  forgotten.reset();
  expect_clean_end();
}

}  // namespace
}  // namespace holdfast
