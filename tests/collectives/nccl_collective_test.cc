#include "holdfast/collectives/nccl_collective.h"

#include <tuple>

#include "collectives/conformance.h"
#include "collectives/gather_cases.h"
#include "collectives/nccl_ranks.h"
#include "nccl_link.h"

namespace holdfast {
namespace {

class NcclConformance : public testing::TestWithParam<std::tuple<conformance::Case, int>> {
 protected:
  void SetUp() override { stand_in::reset(); }
};

TEST_P(NcclConformance, Holds) {
  const auto& [test, size] = GetParam();
  run_nccl(size, test.on_each_rank);
  expect_clean_end();
}

INSTANTIATE_TEST_SUITE_P(Backends, NcclConformance,
                         testing::Combine(testing::ValuesIn(conformance::cases()),
                                          testing::Values(1, 2, 3, 4, 8)),
                         [](const auto& param) {
                           return std::string(std::get<0>(param.param).name) + "_on_" +
                                  std::to_string(std::get<1>(param.param));
                         });

class NcclGather : public testing::TestWithParam<int> {
 protected:
  void SetUp() override { stand_in::reset(); }
};

TEST_P(NcclGather, OfOneNodeKeepsItsLowestRanks) {
  run_nccl(GetParam(),
           [](Collective& collective) { expect_capped_gathers(collective, [](int) { return 0; }); });
  expect_clean_end();
}

TEST_P(NcclGather, OfNodesWhoseRanksAreNotNeighboursKeepsTheLowestOfEach) {
  run_nccl(
      GetParam(),
      [](Collective& collective) { expect_capped_gathers(collective, [](int r) { return r % 3; }); },
      [](int r) { return "node " + std::to_string(r % 3); });
  expect_clean_end();
}

TEST_P(NcclGather, OfWhatIsLeftOutNoByteTravels) {
  run_nccl(GetParam(), [](Collective& collective) {
    std::vector<Bytes> all;
    EXPECT_TRUE(collective.gather("not empty", &all, 1).ok());
  });
  for (int r = 0; r < GetParam(); ++r) {
    EXPECT_EQ(stand_in::calls(r, "ncclSend"), 0);
    EXPECT_EQ(stand_in::calls(r, "ncclRecv"), 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, NcclGather, testing::Values(1, 2, 3, 4, 8),
                         [](const auto& param) { return std::to_string(param.param); });

using NcclCollectiveTest = NcclTest;

// Whole chunks, one byte less and one more.
TEST_F(NcclCollectiveTest, MessagesAroundTheSizeOfAChunkArriveWhole) {
  run_nccl(3, [](Collective& collective) {
    for (const std::size_t size : {NcclLink::kChunk - 1, NcclLink::kChunk, NcclLink::kChunk + 1}) {
      conformance::expect_gather(collective, [&](int r) {
        return conformance::random_bytes(size + static_cast<std::size_t>(r), static_cast<std::uint64_t>(r));
      });
      conformance::expect_broadcast(collective, conformance::random_bytes(size, 3));
    }
  });
  expect_clean_end();
}

TEST_F(NcclCollectiveTest, WorksWhenEveryCallIsInProgressForAWhile) {
  stand_in::answer_late(3);
  run_nccl(3, [](Collective& collective) {
    conformance::mixed_sequences_never_mix_their_messages(collective);
    conformance::agreed_status_is_that_of_the_lowest_of_several(collective);
  });
  expect_clean_end();
}

TEST_F(NcclCollectiveTest, IsSplitFromTheCallersCommunicatorAndLeavesThatAlone) {
  for (const int late : {0, 2}) {
    stand_in::reset();
    stand_in::answer_late(late);
    on_threads(4, [&](int rank) {
      ncclComm* theirs = stand_in::make_communicator("the trainer's", rank, 4);
      std::unique_ptr<NcclCollective> collective;
      const Status status = NcclCollective::create(theirs, nccl_options(), &collective);
      ASSERT_TRUE(status.ok()) << status.to_string();
      EXPECT_EQ(collective->rank(), rank);
      EXPECT_EQ(collective->size(), 4);
      conformance::gather_from_some_ranks_only(*collective);
    });
    expect_clean_end();
    for (int r = 0; r < 4; ++r) {
      EXPECT_EQ(stand_in::calls(r, "ncclCommDestroy"), 1);
      EXPECT_EQ(stand_in::calls(r, "ncclCommAbort"), 0);
    }
  }
}

TEST_F(NcclCollectiveTest, ArgumentsThatCannotBeRightAreRefusedBeforeAnythingIsMade) {
  std::unique_ptr<NcclCollective> collective;
  const Bytes id(128, 'i');
  NcclOptions long_node;
  long_node.node = std::string(65, 'n');
  EXPECT_EQ(NcclCollective::create(Bytes(127, 'i'), 0, 1, 0, {}, &collective).code(), StatusCode::kUsage);
  // What the others have when their rank could make none, and broadcast what it had.
  EXPECT_EQ(NcclCollective::create(Bytes(128, '\0'), 0, 1, 0, {}, &collective).code(), StatusCode::kUsage);
  EXPECT_EQ(NcclCollective::create(id, 2, 2, 0, {}, &collective).code(), StatusCode::kUsage);
  EXPECT_EQ(NcclCollective::create(id, -1, 2, 0, {}, &collective).code(), StatusCode::kUsage);
  EXPECT_EQ(NcclCollective::create(id, 0, 0, 0, {}, &collective).code(), StatusCode::kUsage);
  EXPECT_EQ(NcclCollective::create(id, 0, 1, 0, long_node, &collective).code(), StatusCode::kUsage);
  EXPECT_EQ(collective, nullptr);
  EXPECT_EQ(stand_in::calls(-1).size(), 0u);
  EXPECT_EQ(stand_in::calls(0).size(), 0u);
}

// ---- on the caller's stream

TEST_F(NcclCollectiveTest, ReducesOnTheCallersStreamAndIsReadLate) {
  run_nccl(3, [](NcclCollective& collective) {
    const cudaStream_t stream = stand_in::make_stream(collective.rank());
    std::uint64_t* lanes = stand_in::make_lanes(collective.rank());
    for (int round = 0; round < 50; ++round) {
      // Five sums in flight, with host collectives in between.
      for (int i = 0; i < 5; ++i) {
        const Record mine = conformance::contribution(collective.rank(), 5 * round + i);
        std::copy(mine.lanes().begin(), mine.lanes().end(), lanes);
        ASSERT_TRUE(collective.reduce_on(stream, lanes).ok());
        while (cudaStreamQuery(stream) == cudaErrorNotReady) std::this_thread::yield();
      }
      conformance::expect_reduce(collective, round);
      for (int i = 0; i < 5; ++i) {
        Record sum;
        const Status status = collective.wait(&sum);
        EXPECT_TRUE(status.ok()) << status.to_string();
        EXPECT_EQ(sum, conformance::expected_sum(3, 5 * round + i));
      }
    }
  });
  expect_clean_end();
}

TEST_F(NcclCollectiveTest, ASumThatWasOverwrittenBeforeItWasReadIsNotGivenOut) {
  run_nccl(1, [](NcclCollective& collective) {
    const cudaStream_t stream = stand_in::make_stream(0);
    std::uint64_t* lanes = stand_in::make_lanes(0);
    Record sum;
    for (std::uint64_t i = 0; i < NcclCollective::kUnread; ++i) {
      ASSERT_TRUE(collective.reduce_on(stream, lanes).ok());
    }
    stand_in::drain();
    EXPECT_TRUE(collective.wait(&sum).ok());
    for (int i = 0; i < 2; ++i) ASSERT_TRUE(collective.reduce_on(stream, lanes).ok());
    stand_in::drain();
    EXPECT_EQ(collective.wait(&sum).code(), StatusCode::kUsage);
  });
}

}  // namespace
}  // namespace holdfast
