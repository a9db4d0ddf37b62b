#include "holdfast/collectives/topology.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>

#include "holdfast/collectives/hardware.h"
#include "holdfast/collectives/thread_collective.h"

namespace holdfast {
namespace {

RankPlacement placement(int rank, const std::string& host, const std::string& cpus = "",
                        const std::string& numa = "") {
  RankPlacement p;
  p.rank = rank;
  p.host = host;
  p.pid = 100 + rank;
  p.cpus = cpus;
  p.numa = numa;
  return p;
}

RankPlacement with_gpu(RankPlacement p, const std::string& uuid, const std::string& pci) {
  p.gpu_uuid = uuid;
  p.gpu_pci = pci;
  return p;
}

TEST(RankPlacement, ItsDeviceIsItsGpuWhereverItSits) {
  EXPECT_EQ(with_gpu(placement(3, "a"), "GPU-1f", "0000:17:00.0").device(), "a/GPU-1f");
}

TEST(RankPlacement, WithoutAGpuItsDeviceIsItsSlotOnTheHost) {
  RankPlacement p = placement(17, "node4");
  p.local_rank = 5;
  EXPECT_EQ(p.device(), "node4/slot 5");
}

TEST(Topology, IsSortedByRankAndFindsRanksByNumber) {
  const Topology topology({placement(5, "c"), placement(0, "a"), placement(2, "b")});
  ASSERT_EQ(topology.placements().size(), 3u);
  EXPECT_EQ(topology.placements()[0].rank, 0);
  EXPECT_EQ(topology.placements()[1].rank, 2);
  EXPECT_EQ(topology.placements()[2].rank, 5);
  ASSERT_NE(topology.find(2), nullptr);
  EXPECT_EQ(topology.find(2)->host, "b");
  for (const int unknown : {-1, 1, 3, 6}) EXPECT_EQ(topology.find(unknown), nullptr) << unknown;
  EXPECT_EQ(Topology().find(0), nullptr);
}

TEST(TopologyMap, OneRank) {
  EXPECT_EQ(Topology({placement(0, "a")}).map(), "1 rank on 1 host\n  a: rank 0\n");
}

TEST(TopologyMap, ConsecutiveRanksOfAHostAreJoined) {
  EXPECT_EQ(Topology({placement(0, "a"), placement(1, "a"), placement(2, "b"), placement(3, "b"),
                      placement(4, "b")})
                .map(),
            "5 ranks on 2 hosts\n"
            "  a: ranks 0-1\n"
            "  b: ranks 2-4\n");
}

TEST(TopologyMap, RanksThatAreDealtRoundTheHostsAreNot) {
  EXPECT_EQ(Topology({placement(0, "b"), placement(1, "a"), placement(2, "b"), placement(3, "a"),
                      placement(4, "a")})
                .map(),
            "5 ranks on 2 hosts\n"
            "  b: rank 0, rank 2\n"
            "  a: rank 1, ranks 3-4\n");
}

TEST(TopologyMap, RanksAreJoinedOnlyWhenTheyShareTheirHardware) {
  EXPECT_EQ(
      Topology({placement(0, "a", "0-3", "0"), placement(1, "a", "0-3", "0"), placement(2, "a", "4-7", "1"),
                placement(3, "a", "4-7", "1"), placement(4, "a", "0-3", "0")})
          .map(),
      "5 ranks on 1 host\n"
      "  a: ranks 0-1 cpus 0-3 numa 0, ranks 2-3 cpus 4-7 numa 1, rank 4 cpus 0-3 numa 0\n");
}

TEST(TopologyMap, GpusAreNamedWithTheirBus) {
  EXPECT_EQ(Topology({with_gpu(placement(0, "a", "0-7", "0"), "GPU-00", "0000:17:00.0"),
                      with_gpu(placement(1, "a", "0-7", "0"), "GPU-01", "0000:65:00.0"),
                      with_gpu(placement(2, "a", "0-7", "0"), "GPU-01", "0000:65:00.0")})
                .map(),
            "3 ranks on 1 host\n"
            "  a: rank 0 cpus 0-7 numa 0 gpu GPU-00 at 0000:17:00.0, "
            "ranks 1-2 cpus 0-7 numa 0 gpu GPU-01 at 0000:65:00.0\n");
}

TEST(TopologyMap, AtMostSoManyHostsAreShownAndTheRestCounted) {
  std::vector<RankPlacement> placements;
  for (int r = 0; r < 8; ++r) placements.push_back(placement(r, "h" + std::to_string(r / 2)));
  const Topology topology(std::move(placements));
  EXPECT_EQ(topology.map(4),
            "8 ranks on 4 hosts\n  h0: ranks 0-1\n  h1: ranks 2-3\n  h2: ranks 4-5\n  h3: ranks 6-7\n");
  EXPECT_EQ(topology.map(2), "8 ranks on 4 hosts\n  h0: ranks 0-1\n  h1: ranks 2-3\n  and 2 more hosts\n");
  EXPECT_EQ(topology.map(3),
            "8 ranks on 4 hosts\n  h0: ranks 0-1\n  h1: ranks 2-3\n  h2: ranks 4-5\n  and 1 more host\n");
}

TEST(TopologyMap, OfAHugeJobIsShort) {
  std::vector<RankPlacement> placements;
  for (int r = 0; r < 32'768; ++r) placements.push_back(placement(r, "node" + std::to_string(r / 8)));
  const std::string map = Topology(std::move(placements)).map();
  EXPECT_EQ(std::ranges::count(map, '\n'), 1 + 64 + 1);
  EXPECT_TRUE(map.starts_with("32768 ranks on 4096 hosts\n  node0: ranks 0-7\n")) << map.substr(0, 100);
  EXPECT_TRUE(map.ends_with("  and 4032 more hosts\n")) << map.substr(map.size() - 100);
}

// Ranks on hosts that are dealt out in turn; what rank r passes.
RankPlacement pretended(int r) {
  RankPlacement p = placement(r, "host" + std::to_string(r % 3), std::to_string(r), std::to_string(r % 2));
  p.gpu_uuid = r % 2 == 0 ? "" : "GPU-" + std::to_string(r);
  p.gpu_pci = r % 2 == 0 ? "" : "0000:0" + std::to_string(r) + ":00.0";
  p.axes = {{"dp", r / 2}, {"tp", r % 2}, {"", -1}};
  if (r == 0) p.axes.clear();
  p.local_rank = 77;  // not for the caller to say
  return p;
}

TEST(GatherTopology, Rank0GetsAllAndTheOthersNothing) {
  for (const int ranks : {1, 2, 3, 8}) {
    ThreadGroup(ranks).run([&](Collective& collective) {
      Topology topology({placement(0, "left over")});
      EXPECT_TRUE(gather_topology(collective, pretended(collective.rank()), &topology).ok());
      if (collective.rank() != 0) {
        EXPECT_TRUE(topology.placements().empty());
        return;
      }
      EXPECT_EQ(topology.placements().size(), static_cast<std::size_t>(ranks));
      for (int r = 0; r < ranks; ++r) {
        const RankPlacement* found = topology.find(r);
        const RankPlacement sent = pretended(r);
        ASSERT_NE(found, nullptr);
        EXPECT_EQ(found->host, sent.host);
        EXPECT_EQ(found->pid, sent.pid);
        EXPECT_EQ(found->cpus, sent.cpus);
        EXPECT_EQ(found->numa, sent.numa);
        EXPECT_EQ(found->gpu_uuid, sent.gpu_uuid);
        EXPECT_EQ(found->gpu_pci, sent.gpu_pci);
        EXPECT_EQ(found->axes, sent.axes);
        EXPECT_EQ(found->local_rank, r / 3) << "rank " << r;
      }
    });
  }
}

TEST(GatherTopology, NamesMayHoldAnyBytes) {
  const std::string odd("a\0\n\xff: b", 8);
  ThreadGroup(2).run([&](Collective& collective) {
    RankPlacement mine = placement(collective.rank(), odd);
    mine.axes[odd] = 5;
    Topology topology;
    EXPECT_TRUE(gather_topology(collective, mine, &topology).ok());
    if (collective.rank() != 0) return;
    EXPECT_EQ(topology.find(1)->host, odd);
    EXPECT_EQ(topology.find(1)->axes.at(odd), 5);
    EXPECT_EQ(topology.find(1)->local_rank, 1);
  });
}

std::string this_host() {
  char host[256] = "";
  gethostname(host, sizeof(host) - 1);
  return host;
}

TEST(Placement, HostAndProcessAreKnownWithoutAnyLibrary) {
  const RankPlacement p = basic_placement(3);
  EXPECT_EQ(p.rank, 3);
  EXPECT_EQ(p.host, this_host());
  EXPECT_EQ(p.pid, getpid());
  EXPECT_EQ(p.local_rank, 0);
  EXPECT_TRUE(p.cpus.empty() && p.numa.empty() && p.gpu_uuid.empty() && p.gpu_pci.empty() && p.axes.empty());
}

// "0-3,8" -> 0 1 2 3 8.
std::vector<int> cpu_numbers(const std::string& list) {
  std::vector<int> numbers;
  for (std::size_t at = 0; at < list.size();) {
    std::size_t used = 0;
    const int first = std::stoi(list.substr(at), &used);
    at += used;
    int last = first;
    if (at < list.size() && list[at] == '-') {
      last = std::stoi(list.substr(at + 1), &used);
      at += used + 1;
    }
    for (int cpu = first; cpu <= last; ++cpu) numbers.push_back(cpu);
    if (at < list.size()) {
      EXPECT_EQ(list[at], ',') << list;
      ++at;
    }
  }
  return numbers;
}

TEST(Placement, TheCpusAreThoseThatTheProcessMayRunOn) {
  cpu_set_t set;
  CPU_ZERO(&set);
  ASSERT_EQ(sched_getaffinity(0, sizeof(set), &set), 0);
  std::vector<int> allowed;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &set)) allowed.push_back(cpu);
  }
  const RankPlacement p = detect_placement(2);
  EXPECT_EQ(p.rank, 2);
  EXPECT_EQ(p.host, this_host());
  EXPECT_EQ(p.pid, getpid());
  EXPECT_EQ(cpu_numbers(p.cpus), allowed);
  EXPECT_TRUE(p.gpu_uuid.empty()) << "no CUDA context was made here";
  EXPECT_TRUE(p.gpu_pci.empty());
}

// The same in a process that was bound before it began, as mpirun does it.
TEST(Placement, AProcessThatIsBoundToOneCpuHasThatOne) {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  ASSERT_EQ(sched_getaffinity(0, sizeof(allowed), &allowed), 0);
  std::size_t last = 0;
  for (std::size_t cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &allowed)) last = cpu;
  }
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(last, &one);
    if (sched_setaffinity(0, sizeof(one), &one) == 0) {
      execl("/proc/self/exe", "topology_test",
            "--gtest_filter=Placement.TheCpusAreThoseThatTheProcessMayRunOn", nullptr);
    }
    _exit(1);
  }
  int state = 0;
  ASSERT_EQ(waitpid(child, &state, 0), child);
  EXPECT_TRUE(WIFEXITED(state));
  EXPECT_EQ(WEXITSTATUS(state), 0);
}

}  // namespace
}  // namespace holdfast
