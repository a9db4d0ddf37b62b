// What the watchdog asks and does from its own thread, while another is anywhere.
#include <atomic>

#include "collectives/conformance.h"
#include "collectives/nccl_ranks.h"

namespace holdfast {
namespace {

using stand_in::Kind;
using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

using NcclHealth = NcclTest;

Status reduce(NcclCollective& collective) {
  Record record;
  return collective.reduce(record);
}

// As the watchdog asks, until there is something.
Status failure_of(NcclCollective& collective) {
  Status health;
  EXPECT_TRUE(soon([&] { return !(health = collective.health()).ok(); }));
  return health;
}

constexpr char kAsynchronous[] =
    "RANK_MISSING (84): asynchronous error of NCCL: remote process exited: the last words";

TEST_F(NcclHealth, AnAsynchronousErrorIsKnownWithoutACollectiveAndIsTheReasonOfTheNextFailure) {
  run_nccl(1, [](NcclCollective& collective) {
    EXPECT_TRUE(collective.health().ok());
    inject_next("ncclCommGetAsyncError", 0, Kind::kAsyncError);
    EXPECT_EQ(failure_of(collective).to_string(), kAsynchronous);
    EXPECT_EQ(collective.health().to_string(), kAsynchronous);
    EXPECT_EQ(stand_in::calls(0, "ncclCommAbort"), 0);
    collective.abort();
    EXPECT_EQ(stand_in::calls(0, "ncclCommAbort"), 1);
    EXPECT_EQ(reduce(collective).to_string(),
              "RANK_MISSING (84): ncclAllReduce: the communicator was aborted, for asynchronous error of "
              "NCCL: remote process exited: the last words");
    EXPECT_EQ(collective.health().to_string(), kAsynchronous);
  });
  expect_clean_end();
}

TEST_F(NcclHealth, ACallThatIsRefusedIsAFailureToo) {
  run_nccl(1, [](NcclCollective& collective) {
    inject_next("ncclCommGetAsyncError", 0, Kind::kError);
    EXPECT_NE(failure_of(collective).message().find("injected system error"), std::string::npos);
  });
  expect_clean_end();
}

TEST_F(NcclHealth, AfterAFailureItIsThatFailure) {
  run_nccl(1, [](NcclCollective& collective) {
    inject_next("ncclAllReduce", 0, Kind::kError);
    const Status failure = reduce(collective);
    EXPECT_EQ(failure.code(), StatusCode::kRankMissing);
    EXPECT_EQ(collective.health().to_string(), failure.to_string());
  });
  expect_clean_end();
}

TEST_F(NcclHealth, AfterAnAbortItSaysSo) {
  run_nccl(1, [](NcclCollective& collective) {
    collective.abort();
    EXPECT_EQ(collective.health().to_string(), "RANK_MISSING (84): the communicator was aborted");
  });
  expect_clean_end();
}

TEST_F(NcclHealth, IsAskedForWhileCollectivesRunAndHarmsNone) {
  run_nccl(3, [](NcclCollective& collective) {
    std::atomic<bool> over{false};
    std::jthread watchdog([&] {
      while (!over) {
        EXPECT_TRUE(collective.health().ok());
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      }
    });
    for (int round = 0; round < 1000; ++round) conformance::expect_reduce(collective, round);
    conformance::gather_of_a_mebibyte_from_each(collective);
    over = true;
  });
  for (int rank = 0; rank < 3; ++rank) EXPECT_GT(stand_in::calls(rank, "ncclCommGetAsyncError"), 1000);
  expect_clean_end();
}

// The watchdog has peers to answer.
TEST_F(NcclHealth, IsGivenAtOnceWhenNcclDoesNotAnswer) {
  run_nccl(1, [](NcclCollective& collective) {
    inject_next("ncclCommGetAsyncError", 0, Kind::kDwells);
    EXPECT_TRUE(collective.health().ok());
    EXPECT_TRUE(soon([] { return stand_in::held_back() == 1; }));
    const auto start = Clock::now();
    for (int i = 0; i < 100; ++i) EXPECT_TRUE(collective.health().ok());
    EXPECT_LT(Clock::now() - start, milliseconds(500));
    EXPECT_EQ(stand_in::held_back(), 1);
    stand_in::release();
    conformance::expect_reduce(collective, 1);
  });
  expect_clean_end();
}

// NCCL takes one call at a time: a collective behind an answer that does not come ends by the deadline.
TEST_F(NcclHealth, ACollectiveBehindAnAnswerThatNeverComesEndsByItsDeadline) {
  Bytes id;
  ASSERT_TRUE(NcclCollective::make_id(&id).ok());
  std::unique_ptr<NcclCollective> collective;
  ASSERT_TRUE(NcclCollective::create(id, 0, 1, 0, nccl_options(milliseconds(500)), &collective).ok());
  inject_next("ncclCommGetAsyncError", 0, Kind::kDwells);
  EXPECT_TRUE(collective->health().ok());
  EXPECT_TRUE(soon([] { return stand_in::held_back() == 1; }));
  const auto start = Clock::now();
  const Status status = reduce(*collective);
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(8));
  EXPECT_NE(status.message().find("ncclAllReduce did not end within 500 ms"), std::string::npos);
  // What an abort is there to end is not waited for beyond a second.
  EXPECT_EQ(stand_in::misuse(),
            (std::vector<std::string>{"ncclCommAbort while another thread is in ncclCommGetAsyncError"}));
  stand_in::release();
  collective.reset();
  EXPECT_TRUE(soon([] { return stand_in::held() == 0; }));
}

// ---- an abort that meets a call

TEST_F(NcclHealth, AnAbortWaitsForTheCallThatAnotherThreadIsInAndNoneFollows) {
  for (const std::string function :
       {"ncclAllReduce", "ncclAllGather", "ncclBroadcast", "ncclCommGetAsyncError"}) {
    SCOPED_TRACE(function);
    stand_in::reset();
    run_nccl(1, [&](NcclCollective& collective) {
      inject_next(function, 0, Kind::kDwells);
      std::jthread watchdog([&] {
        EXPECT_TRUE(soon([] { return stand_in::held_back() == 1; }));
        std::jthread other([&] { collective.abort(); });
        std::this_thread::sleep_for(milliseconds(100));
        EXPECT_EQ(stand_in::calls(0, "ncclCommAbort"), 0);
        stand_in::release();
      });
      std::vector<Bytes> all;
      Bytes bytes = "b";
      Status status;
      if (function == "ncclAllGather") status = collective.gather("mine", &all);
      if (function == "ncclBroadcast") status = collective.broadcast(&bytes);
      if (status.ok()) status = reduce(collective);
      EXPECT_EQ(status.code(), StatusCode::kRankMissing);
      watchdog.join();
      EXPECT_EQ(stand_in::calls(0, "ncclCommAbort"), 1);
      const auto before = stand_in::calls(0);
      EXPECT_EQ(reduce(collective).code(), StatusCode::kRankMissing);
      EXPECT_EQ(collective.health().code(), StatusCode::kRankMissing);
      std::this_thread::sleep_for(milliseconds(20));
      EXPECT_EQ(stand_in::calls(0), before);
    });
    expect_clean_end();
  }
}

TEST_F(NcclHealth, AnAbortDoesNotWaitForEverForACallThatDoesNotReturn) {
  Bytes id;
  ASSERT_TRUE(NcclCollective::make_id(&id).ok());
  std::unique_ptr<NcclCollective> collective;
  ASSERT_TRUE(NcclCollective::create(id, 0, 1, 0, nccl_options(), &collective).ok());
  inject_next("ncclAllReduce", 0, Kind::kNeverReturns);
  std::jthread trainer([&] {
    cudaSetDevice(0);
    EXPECT_EQ(reduce(*collective).code(), StatusCode::kRankMissing);
  });
  EXPECT_TRUE(soon([] { return stand_in::held_back() == 1; }));
  const auto start = Clock::now();
  collective->abort();
  EXPECT_GE(Clock::now() - start, milliseconds(900));
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(8));
  EXPECT_EQ(stand_in::calls(0, "ncclCommAbort"), 1);
  EXPECT_EQ(stand_in::misuse(),
            (std::vector<std::string>{"ncclCommAbort while another thread is in ncclAllReduce"}));
  stand_in::release();
  trainer.join();
  collective.reset();
  EXPECT_EQ(stand_in::held(), 0u);
}

// The threads race: an answer, a collective and an abort.
TEST_F(NcclHealth, CallsAndAnAbortNeverMeet) {
  for (int round = 0; round < 60; ++round) {
    stand_in::reset();
    run_nccl(1, [&](NcclCollective& collective) {
      std::jthread watchdog([&] {
        const auto until = Clock::now() + std::chrono::microseconds(50 * round);
        while (Clock::now() < until) EXPECT_TRUE(collective.health().ok());
        collective.abort();
      });
      for (int i = 0; i < 1'000'000; ++i) {
        if (!reduce(collective).ok()) break;
      }
    });
    EXPECT_EQ(stand_in::calls(0, "ncclCommAbort"), 1);
    expect_clean_end();
  }
}

}  // namespace
}  // namespace holdfast
