#include "declared_state.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <map>

#include "holdfast/coord/printable.h"
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

Status judge(const std::vector<Bytes>& all, RanksState* out) {
  for (std::size_t r = 0; r < all.size(); ++r) {
    const int rank = static_cast<int>(r);
    Part part;
    if (!part.ParseFromString(all[r]))
      return Status::internal(fmt::format("malformed state of rank {}", rank));
    out->writes.push_back(part.tensors_size() > 0);
    for (const TensorEntry& entry : part.tensors()) {
      if (entry.has_shard_total()) out->arrays.add(entry, rank);
    }
  }
  const std::string fault = out->arrays.fault();
  return fault.empty() ? Status() : Status::usage(fault);
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

Status agree_on_state(Collective& collective, const DeclaredState& mine, RanksState* out) {
  Bytes theirs = collective.rank() == 0 ? mine.replicated.SerializeAsString() : Bytes();
  if (Status s = collective.broadcast(&theirs); !s.ok()) return s;
  Part of_rank_0;
  Status same;
  if (!of_rank_0.ParseFromString(theirs)) {
    same = Status::internal("malformed state of rank 0");
  } else if (const std::string why =
                 difference(mine.replicated, of_rank_0, "its replicated state", "rank 0's");
             !why.empty()) {
    same = Status::usage("the ranks share another state: " + why);
  }
  if (Status s = agree_on_status(collective, same); !s.ok()) return s;

  // Of what is a rank's own, one entry says that there is some; of what rank 0 writes for all, too.
  Part own = mine.sharded;
  if (mine.per_rank.tensors_size() > 0) *own.add_tensors() = mine.per_rank.tensors(0);
  if (collective.rank() == 0 && mine.replicated.tensors_size() > 0)
    *own.add_tensors() = mine.replicated.tensors(0);
  std::vector<Bytes> all;
  if (Status s = collective.gather(own.SerializeAsString(), &all); !s.ok()) return s;
  return agree_on_status(collective, collective.rank() == 0 ? judge(all, out) : Status());
}

}  // namespace holdfast
