// Where the ranks of a job run.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "holdfast/collectives/collective.h"

namespace holdfast {

// Where one rank runs. What is not known is empty.
struct RankPlacement {
  int rank = 0;
  std::string host;
  std::int64_t pid = 0;
  int local_rank = 0;               // among the ranks of its host, by rank; set by gather_topology()
  std::string cpus;                 // the CPUs it may run on, e.g. "0-3,8"
  std::string numa;                 // the NUMA nodes of these, e.g. "0"
  std::string gpu_uuid;             // "GPU-8f3a..."
  std::string gpu_pci;              // "0000:17:00.0"
  std::map<std::string, int> axes;  // the caller's tags, e.g. {"dp": 0, "tp": 1}

  // What broke when this rank computes wrong: its GPU when it has one, else its slot on the host.
  std::string device() const;
};

class Topology {
 public:
  // Sorted by rank, one each.
  explicit Topology(std::vector<RankPlacement> placements);
  Topology() = default;

  const std::vector<RankPlacement>& placements() const { return placements_; }
  const RankPlacement* find(int rank) const;  // null when it is not known

  // A few lines for people: hosts with their ranks, consecutive ranks of one host joined. At most
  // `most_hosts` hosts are shown.
  std::string map(std::size_t most_hosts = 64) const;

 private:
  std::vector<RankPlacement> placements_;
};

// Collective, once at the start. Rank 0 gets the topology of all; other ranks an empty one.
Status gather_topology(Collective& collective, RankPlacement mine, Topology* out);

// Host and process of the caller: what is known without any library.
RankPlacement basic_placement(int rank);

}  // namespace holdfast
