// The two levels of the MPI backend: its gather, what it moves between nodes, and the topology gathered over
// it.
#include <gtest/gtest.h>

#include <cstdio>

#include "collectives/gather_cases.h"
#include "holdfast/collectives/hardware.h"
#include "holdfast/collectives/mpi_collective.h"
#include "holdfast/collectives/topology.h"

namespace {

// How ranks are dealt to nodes: which node rank r of `size` is on. Null: as MPI finds.
int (*g_node_of)(int rank, int size) = nullptr;

int all_on_their_own(int rank, int) { return rank; }
int in_turn(int rank, int) { return rank % 2; }
int halves(int rank, int size) { return rank < (size + 1) / 2 ? 0 : 1; }
int first_alone(int rank, int) { return rank == 0 ? 0 : 1; }
int last_with_first(int rank, int size) { return rank == 0 || rank == size - 1 ? 0 : 1; }

}  // namespace

// MPI's profiling interface lets a program stand in front of the library: here it is a machine room.
extern "C" int MPI_Comm_split_type(MPI_Comm comm, int type, int key, MPI_Info info, MPI_Comm* out) {
  if (g_node_of == nullptr) return PMPI_Comm_split_type(comm, type, key, info, out);
  int rank = 0;
  int size = 0;
  MPI_Comm_rank(comm, &rank);
  MPI_Comm_size(comm, &size);
  return MPI_Comm_split(comm, g_node_of(rank, size), key, out);
}

namespace holdfast {
namespace {

std::unique_ptr<Collective> over_world() {
  std::unique_ptr<Collective> collective;
  const Status status = MpiCollective::create(MPI_COMM_WORLD, &collective);
  EXPECT_TRUE(status.ok()) << status.to_string();
  return collective;
}

GatherTraffic traffic_of(const Collective& collective) {
  return dynamic_cast<const MpiCollective&>(collective).gather_traffic();
}

class MpiNodes : public testing::Test {
 protected:
  void TearDown() override { g_node_of = nullptr; }
};

TEST_F(MpiNodes, OnOneNodeGatherKeepsTheLowestRanksAndMovesNothingBetweenNodes) {
  const auto collective = over_world();
  expect_capped_gathers(*collective, [](int) { return 0; });
  EXPECT_EQ(traffic_of(*collective).messages, 0u);
  EXPECT_EQ(traffic_of(*collective).bytes, 0u);
}

TEST_F(MpiNodes, OverNodesOfAnyShapeGatherKeepsTheLowestRanksOfEach) {
  for (const auto& shape : {all_on_their_own, in_turn, halves, first_alone, last_with_first}) {
    g_node_of = shape;
    const auto collective = over_world();
    const int size = collective->size();
    expect_capped_gathers(*collective, [&](int r) { return shape(r, size); });
  }
}

// Rank 0 is told once by each other node that has anything to say, with no more than the cap.
TEST_F(MpiNodes, TrafficAtRank0GrowsWithTheBadRanksUpToTheCapOfEachNode) {
  constexpr std::size_t kReport = 100;
  constexpr std::size_t kEnvelope = 8;  // the rank and the length
  for (const auto& shape : {all_on_their_own, in_turn, halves, first_alone, last_with_first}) {
    g_node_of = shape;
    const auto collective = over_world();
    const int size = collective->size();
    for (const int bad : {0, 1, 2, size}) {
      for (const int most : {1, 2, 1000}) {
        const auto report = [&](int r) { return r >= size - bad ? Bytes(kReport, 'r') : Bytes(); };
        const GatherTraffic before = traffic_of(*collective);
        std::vector<Bytes> all;
        EXPECT_TRUE(collective->gather(report(collective->rank()), &all, most).ok());
        const GatherTraffic after = traffic_of(*collective);
        if (collective->rank() != 0) {
          EXPECT_EQ(after.messages, 0u);
          EXPECT_EQ(after.bytes, 0u);
          continue;
        }
        std::map<int, std::size_t> by_node;
        const auto node_of = [&](int r) { return shape(r, size); };
        const std::vector<Bytes> expected = expected_gather(size, most, report, node_of);
        for (int r = 0; r < size; ++r) {
          if (!expected[static_cast<std::size_t>(r)].empty()) ++by_node[node_of(r)];
        }
        by_node.erase(node_of(0));
        std::size_t reports = 0;
        for (const auto& [node, count] : by_node) reports += count;
        EXPECT_EQ(after.messages - before.messages, by_node.size()) << bad << " bad, at most " << most;
        EXPECT_EQ(after.bytes - before.bytes, reports * (kReport + kEnvelope))
            << bad << " bad, at most " << most;
      }
    }
  }
}

TEST_F(MpiNodes, OtherCollectivesGoOnBesideTheTwoLevels) {
  g_node_of = in_turn;
  const auto collective = over_world();
  for (int round = 0; round < 50; ++round) {
    Record record;
    record.lanes()[0] = 1;
    EXPECT_TRUE(collective->reduce(record).ok());
    EXPECT_EQ(record.lanes()[0], static_cast<std::uint64_t>(collective->size()));
    expect_capped_gather(
        *collective, 1, [&](int r) { return std::to_string(r * 1000 + round); },
        [](int r) { return in_turn(r, 0); });
    Bytes bytes = collective->rank() == 0 ? "round " + std::to_string(round) : Bytes();
    EXPECT_TRUE(collective->broadcast(&bytes).ok());
    EXPECT_EQ(bytes, "round " + std::to_string(round));
  }
}

TEST_F(MpiNodes, TheTopologyOfThisJobIsOneHostWithEveryRankAndItsTags) {
  const auto collective = over_world();
  RankPlacement mine = detect_placement(collective->rank());
  mine.axes = {{"dp", collective->rank() / 2}, {"tp", collective->rank() % 2}};
  Topology topology;
  EXPECT_TRUE(gather_topology(*collective, mine, &topology).ok());
  if (collective->rank() != 0) {
    EXPECT_TRUE(topology.placements().empty());
    return;
  }
  ASSERT_EQ(topology.placements().size(), static_cast<std::size_t>(collective->size()));
  std::map<std::int64_t, int> pids;
  for (int r = 0; r < collective->size(); ++r) {
    const RankPlacement& p = *topology.find(r);
    EXPECT_EQ(p.host, mine.host);
    EXPECT_EQ(p.local_rank, r);
    EXPECT_EQ(p.device(), mine.host + "/slot " + std::to_string(r));
    EXPECT_EQ(p.axes, (std::map<std::string, int>{{"dp", r / 2}, {"tp", r % 2}}));
    EXPECT_FALSE(p.cpus.empty());
    ++pids[p.pid];
  }
  EXPECT_EQ(pids.size(), static_cast<std::size_t>(collective->size()));
  EXPECT_NE(topology.map().find(" on 1 host\n"), std::string::npos) << topology.map();
}

// Rank 0 speaks for the job; another rank only says what failed.
class FailuresOnly final : public testing::EmptyTestEventListener {
 public:
  explicit FailuresOnly(int rank) : rank_(rank) {}
  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (!result.failed()) return;
    std::fprintf(stderr, "rank %d: %s:%d: %s\n", rank_, result.file_name() ? result.file_name() : "?",
                 result.line_number(), result.message());
  }

 private:
  const int rank_;
};

// Every rank gives the worst of all results, so that a failure on any rank fails the job.
int run_on_every_rank(int* argc, char** argv) {
  GTEST_FLAG_SET(color, "no");  // mpirun's output is no terminal
  testing::InitGoogleTest(argc, argv);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  if (rank != 0) {
    auto& listeners = testing::UnitTest::GetInstance()->listeners();
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new FailuresOnly(rank));
  }
  int result = RUN_ALL_TESTS();
  if (testing::UnitTest::GetInstance()->test_to_run_count() == 0) result = 1;
  MPI_Allreduce(MPI_IN_PLACE, &result, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
  return result;
}

}  // namespace
}  // namespace holdfast

int main(int argc, char** argv) {
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &provided);
  const int result = holdfast::run_on_every_rank(&argc, argv);
  MPI_Finalize();
  return result;
}
