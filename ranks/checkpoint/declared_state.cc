#include "declared_state.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <optional>

#include "holdfast/coord/printable.h"
#include "holdfast/coord/storage/sha256.h"
#include "part_file.h"

namespace holdfast {
namespace {

std::string kind_of(const TensorEntry& entry) {
  if (entry.is_bytes()) return "bytes";
  return fmt::format("{}[{}]", entry.dtype(), fmt::join(entry.shape(), ","));
}

Status add_to(Part* part, const PartTensor& tensor) {
  TensorEntry* entry = part->add_tensors();
  if (Status s = describe(tensor, entry); !s.ok()) return s;
  if (tensor.is_bytes) {
    entry->clear_shape();
    entry->clear_bytes();
  }
  return Status();
}

Status judge(const std::vector<Bytes>& all, const ReplicaGroups& groups, RanksState* out) {
  out->groups = groups;
  for (std::size_t r = 0; r < all.size(); ++r) {
    const int rank = static_cast<int>(r);
    Part part;
    if (!part.ParseFromString(all[r]))
      return Status::internal(fmt::format("malformed state of rank {}", rank));
    out->writes.push_back(part.tensors_size() > 0);
    for (const TensorEntry& entry : part.tensors()) {
      if (entry.has_shard_total()) out->arrays.add(entry, rank, groups.name_of(rank));
    }
  }
  const std::string fault = out->arrays.fault();
  return fault.empty() ? Status() : Status::usage(fault);
}

// The same for two declarations between which difference() finds none. Names hold no line ends.
std::string digest(const Part& part) {
  std::vector<std::string> lines;
  for (const TensorEntry& entry : part.tensors()) {
    lines.push_back(fmt::format("{}\n{}\n", entry.name(), kind_of(entry)));
  }
  std::ranges::sort(lines);
  return sha256(fmt::format("{}", fmt::join(lines, "")));
}

// The lowest rank that does not share what the first of its group does.
std::optional<int> lowest_odd_rank(const std::vector<Bytes>& digests, const ReplicaGroups& groups) {
  std::vector<const Bytes*> of_firsts(static_cast<std::size_t>(groups.groups()), nullptr);
  for (std::size_t r = 0; r < digests.size(); ++r) {
    const Bytes*& of_first = of_firsts[static_cast<std::size_t>(groups.group_of(static_cast<int>(r)))];
    if (of_first == nullptr) of_first = &digests[r];
    if (*of_first != digests[r]) return static_cast<int>(r);
  }
  return std::nullopt;
}

// Whether `mine` is what the first rank of its group shares.
Status compare(const Part& mine, const Bytes& theirs, int first) {
  Part of_first;
  if (!of_first.ParseFromString(theirs))
    return Status::internal(fmt::format("malformed state of rank {}", first));
  const std::string why = difference(mine, of_first, "its replicated state", fmt::format("rank {}'s", first));
  return why.empty() ? Status() : Status::usage("the ranks share another state: " + why);
}

// Collective. Names and shapes go over the wire only when there is a rank to be told from: those of the first
// of its group, by way of rank 0. Which group that is rank 0 tells all, "" for none, so that all make the
// same collectives.
Status agree_on_replicated(Collective& collective, const ReplicaGroups& groups, const Part& mine) {
  const int rank = collective.rank();
  std::vector<Bytes> digests;
  if (Status s = collective.gather(digest(mine), &digests); !s.ok()) return s;
  int first = 0;
  Bytes odd_group;
  if (const auto odd = rank == 0 ? lowest_odd_rank(digests, groups) : std::nullopt) {
    first = groups.first(groups.group_of(*odd));
    odd_group = std::to_string(groups.group_of(*odd));
  }
  if (Status s = collective.broadcast(&odd_group); !s.ok()) return s;
  if (odd_group.empty()) return Status();

  const bool concerned = std::to_string(groups.group_of(rank)) == odd_group;
  std::vector<Bytes> said;
  const Bytes own = concerned && groups.is_first(rank) ? mine.SerializeAsString() : Bytes();
  if (Status s = collective.gather(own, &said); !s.ok()) return s;
  Bytes theirs = rank == 0 ? said[static_cast<std::size_t>(first)] : Bytes();
  if (Status s = collective.broadcast(&theirs); !s.ok()) return s;
  return agree_on_status(collective,
                         concerned ? compare(mine, theirs, groups.first(groups.group_of(rank))) : Status());
}

}  // namespace

Status declare(const TrainingState& state, DeclaredState* out) {
  const auto part_of = [&](Held held) {
    if (held == Held::kReplicated) return &out->replicated;
    return held == Held::kPerRank ? &out->per_rank : &out->sharded;
  };
  for (const StateTensor& tensor : state.tensors()) {
    if (Status s = add_to(part_of(tensor.held), PartTensor::of(tensor, tensor.data)); !s.ok()) return s;
  }
  for (const StateBytes& bytes : state.bytes()) {
    if (Status s = add_to(part_of(bytes.held), PartTensor::of_bytes(bytes.name, "", bytes.renewable));
        !s.ok())
      return s;
  }
  return Status();
}

std::string difference(const Part& mine, const Part& others, const std::string& call_mine,
                       const std::string& call_others) {
  std::map<std::string_view, const TensorEntry*> by_name;
  for (const TensorEntry& entry : others.tensors()) by_name[entry.name()] = &entry;
  for (const TensorEntry& entry : mine.tensors()) {
    const auto at = by_name.find(entry.name());
    if (at == by_name.end()) {
      return fmt::format("{} is in {} and not in {}", printable(entry.name()), call_mine, call_others);
    }
    if (kind_of(entry) != kind_of(*at->second)) {
      return fmt::format("{} is {} in {} and {} in {}", printable(entry.name()), kind_of(entry), call_mine,
                         kind_of(*at->second), call_others);
    }
    by_name.erase(at);
  }
  if (by_name.empty()) return "";
  return fmt::format("{} is in {} and not in {}", printable(by_name.begin()->first), call_others, call_mine);
}

Status agree_on_state(Collective& collective, const ReplicaGroups& groups, const DeclaredState& mine,
                      RanksState* out) {
  if (Status s = agree_on_replicated(collective, groups, mine.replicated); !s.ok()) return s;
  // Of what is a rank's own, one entry says that there is some; of what a first rank writes for its group,
  // too.
  Part own = mine.sharded;
  if (mine.per_rank.tensors_size() > 0) *own.add_tensors() = mine.per_rank.tensors(0);
  if (groups.is_first(collective.rank()) && mine.replicated.tensors_size() > 0)
    *own.add_tensors() = mine.replicated.tensors(0);
  std::vector<Bytes> all;
  if (Status s = collective.gather(own.SerializeAsString(), &all); !s.ok()) return s;
  return agree_on_status(collective, collective.rank() == 0 ? judge(all, groups, out) : Status());
}

}  // namespace holdfast
