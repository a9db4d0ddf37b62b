// Which ranks are replicas of each other: with tensor or pipeline parallelism not all of them hold the same
// layers.
#pragma once

#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "holdfast/collectives/collective.h"

namespace holdfast {

// The ranks of a job, divided into groups of replicas. A group may have any number of ranks, and one rank
// alone is a group, too. Groups are numbered by their first rank. The same on every rank; does not change.
class ReplicaGroups {
 public:
  // All ranks are replicas of each other. To be asked of rank 0 to `ranks` - 1.
  explicit ReplicaGroups(int ranks) : group_of_(static_cast<std::size_t>(ranks), 0), names_(1) {}

  // Collective. Ranks are in one group when their `axes` are equal in all but "dp"; its name is those tags,
  // "pp=1,tp=0". With `override_group`, when their numbers are equal, whatever the tags say; its name is the
  // number. When that makes one group of all ranks, it has no name. RANKS_DISAGREE, on every rank, unless all
  // ranks name the same axes and all or none has a number: a rank that forgot its tags would be compared with
  // nobody.
  static Status agree(Collective& collective, const std::map<std::string, int>& axes,
                      const std::optional<int>& override_group, ReplicaGroups* out);

  int ranks() const { return static_cast<int>(group_of_.size()); }
  bool only_one() const { return names_.size() == 1; }
  int groups() const { return static_cast<int>(names_.size()); }
  int group_of(int rank) const { return group_of_[static_cast<std::size_t>(rank)]; }
  const std::string& name(int group) const { return names_[static_cast<std::size_t>(group)]; }
  const std::string& name_of(int rank) const { return name(group_of(rank)); }
  std::span<const std::string> names() const { return names_; }

  std::vector<int> members(int group) const;  // in order
  int first(int group) const;                 // the one that writes what the group shares
  bool is_first(int rank) const { return first(group_of(rank)) == rank; }

 private:
  std::vector<int> group_of_;  // by rank
  std::vector<std::string> names_;
};

}  // namespace holdfast
