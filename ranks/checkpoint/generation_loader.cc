#include "generation_loader.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <new>
#include <optional>

#include "holdfast/coord/printable.h"
#include "holdfast/coord/storage/safetensors.h"

namespace holdfast {
namespace {

bool is_sharded(const TensorEntry& entry) { return entry.has_shard_total(); }

void add_unsharded(const Part& part, Part* to) {
  for (const TensorEntry& entry : part.tensors()) {
    if (!is_sharded(entry)) *to->add_tensors() = entry;
  }
}

// Of one rank's part, what is its own and no shard. An empty one when it has none.
Part per_rank_part(const Manifest& manifest, int rank) {
  Part own;
  for (const Part& part : manifest.parts()) {
    if (part.has_rank() && part.rank() == rank) add_unsharded(part, &own);
  }
  return own;
}

// The number that a group has in the manifest; none when all ranks were replicas, or it is not there.
std::optional<std::uint32_t> number_of(const Manifest& manifest, const std::string& group) {
  const auto at = std::ranges::find(manifest.groups(), group);
  if (at == manifest.groups().end()) return std::nullopt;
  return static_cast<std::uint32_t>(at - manifest.groups().begin());
}

bool is_of(const Part& part, const std::optional<std::uint32_t>& group) {
  return part.has_group() == group.has_value() && (!group || part.group() == *group);
}

// What the group shares. An empty one when it shares nothing.
Part replicated_part(const Manifest& manifest, const std::optional<std::uint32_t>& group) {
  Part shared;
  for (const Part& part : manifest.parts()) {
    if (!part.has_rank() && is_of(part, group)) add_unsharded(part, &shared);
  }
  return shared;
}

// Why a generation is of other replica groups than this run; "" when it is of the same.
std::string groups_obstacle(const ReplicaGroups& groups, const Manifest& manifest) {
  const auto all_replicas = [](std::string_view one, std::string_view other, int n) {
    return fmt::format("in {} all ranks are replicas of each other, and {} has {} replica groups", one, other,
                       n);
  };
  if (groups.only_one() && manifest.groups_size() == 0) return "";
  if (groups.only_one()) return all_replicas("this run", "the generation", manifest.groups_size());
  if (manifest.groups_size() == 0) return all_replicas("the generation", "this run", groups.groups());
  for (const std::string& name : groups.names()) {
    if (!number_of(manifest, name)) {
      return fmt::format("replica group {} is in this run and not in the generation", printable(name));
    }
  }
  for (const std::string& name : manifest.groups()) {
    if (std::ranges::find(groups.names(), name) == groups.names().end()) {
      return fmt::format("replica group {} is in the generation and not in this run", printable(name));
    }
  }
  return "";
}

bool is_same_place(const Manifest& manifest, const Loading& loading) {
  const auto group = number_of(manifest, loading.groups.name_of(loading.rank));
  return static_cast<int>(manifest.ranks()) == loading.groups.ranks() &&
         std::ranges::none_of(manifest.parts(), [&](const Part& part) {
           return part.has_rank() && part.rank() == loading.rank && !is_of(part, group);
         });
}

// The first that no run with another number of ranks can do without.
const TensorEntry* first_bound(const Part& own) {
  const auto at =
      std::ranges::find_if(own.tensors(), [](const TensorEntry& entry) { return !entry.renewable(); });
  return at == own.tensors().end() ? nullptr : &*at;
}

// What keeps a generation of another number of ranks from being used; "" when nothing does.
std::string per_rank_obstacle(const DeclaredState& mine, const Manifest& manifest, int ranks) {
  const auto say = [&](const std::string& name, const std::string& whose) {
    return fmt::format(
        "it is of {} ranks and this run has {}, but {} is {}, which suits no other number of ranks",
        manifest.ranks(), ranks, printable(name), whose);
  };
  for (int rank = 0; rank < static_cast<int>(manifest.ranks()); ++rank) {
    const Part own = per_rank_part(manifest, rank);
    const auto* found = first_bound(own);
    if (found != nullptr) return say(found->name(), fmt::format("the own state of its rank {}", rank));
  }
  const auto* found = first_bound(mine.per_rank);
  return found != nullptr ? say(found->name(), "this rank's own state") : "";
}

// What keeps a rank that has changed its group from going on; "" when nothing does.
std::string moved_obstacle(const DeclaredState& mine, const Manifest& manifest, const Loading& loading) {
  const Part own = per_rank_part(manifest, loading.rank);
  const auto* found = first_bound(own);
  if (found == nullptr) found = first_bound(mine.per_rank);
  if (found == nullptr) return "";
  return fmt::format("rank {} is of replica group {} in this run and was of another, but {} is its own state",
                     loading.rank, printable(loading.groups.name_of(loading.rank)), printable(found->name()));
}

struct Range {
  std::uint64_t begin = 0;  // in stored elements
  std::uint64_t end = 0;
};

Range range_of(const TensorEntry& entry) {
  return {entry.shard_offset(), entry.shard_offset() + stored_elements(entry)};
}

Range range_of(const StateTensor& tensor) {
  TensorEntry entry;
  // check() has taken the state, so that it can be described.
  return describe(PartTensor::of(tensor, tensor.data), &entry).ok() ? range_of(entry) : Range{};
}

Range overlap(const Range& a, const Range& b) { return {std::max(a.begin, b.begin), std::min(a.end, b.end)}; }

std::span<std::byte> memory_of(const StateTensor& tensor) {
  return {static_cast<std::byte*>(tensor.data), static_cast<std::size_t>(tensor.bytes())};
}

}  // namespace

Status check_match(const DeclaredState& mine, const Manifest& manifest, const Loading& loading) {
  const int ranks = loading.groups.ranks();
  std::string why = groups_obstacle(loading.groups, manifest);
  if (why.empty()) {
    const Part shared = replicated_part(manifest, number_of(manifest, loading.groups.name_of(loading.rank)));
    why = difference(mine.replicated, shared, "this run's state", "the generation");
  }
  if (!why.empty()) return Status::usage(why);
  if (is_same_place(manifest, loading)) {
    why = difference(mine.per_rank, per_rank_part(manifest, loading.rank), "this rank's own state",
                     "the generation");
  } else if (static_cast<int>(manifest.ranks()) == ranks) {
    why = moved_obstacle(mine, manifest, loading);
  } else {
    why = per_rank_obstacle(mine, manifest, ranks);
  }
  return why.empty() ? Status() : Status::usage(why);
}

GenerationLoader::GenerationLoader(FileSystem& files, std::string folder, const Manifest& manifest,
                                   const TrainingState& state, const Loading& loading)
    : files_(files),
      folder_(std::move(folder)),
      manifest_(manifest),
      rank_(loading.rank),
      group_(number_of(manifest, loading.groups.name_of(loading.rank))),
      same_place_(is_same_place(manifest, loading)) {
  for (const StateTensor& tensor : state.tensors()) tensors_[tensor.name] = &tensor;
  for (const StateBytes& bytes : state.bytes()) bytes_[bytes.name] = &bytes;
}

bool GenerationLoader::is_needed(const Part& part, const TensorEntry& entry) const {
  if (!is_sharded(entry) && part.has_rank()) return part.rank() == rank_ && same_place_;
  if (!is_of(part, group_)) return false;
  if (!is_sharded(entry)) return true;
  const auto at = tensors_.find(entry.name());
  if (at == tensors_.end() || at->second->held != Held::kSharded) return false;
  const Range common = overlap(range_of(entry), range_of(*at->second));
  return common.begin < common.end;
}

Status GenerationLoader::read() {
  try {
    for (const Part& part : manifest_.parts()) {
      const bool needed = std::ranges::any_of(
          part.tensors(), [&](const TensorEntry& entry) { return is_needed(part, entry); });
      if (!needed) continue;
      if (Status s = read_part(part); !s.ok()) return s;
    }
  } catch (const std::bad_alloc&) {
    return Status::internal("no memory to read " + folder_);
  }
  return Status();
}

Status GenerationLoader::read_part(const Part& part) {
  PartReader reader;
  if (Status s = reader.open(files_, folder_, part); !s.ok()) return s;
  for (int i = 0; i < part.tensors_size(); ++i) {
    if (!is_needed(part, part.tensors(i))) continue;
    if (Status s = read_entry(reader, i); !s.ok()) return s;
  }
  return Status();
}

Status GenerationLoader::read_entry(PartReader& reader, int i) {
  const TensorEntry& entry = reader.tensor(i);
  if (entry.is_bytes()) {
    Bytes& to = read_bytes_[entry.name()];
    to.resize(entry.bytes());
    return read_into(reader, i, std::as_writable_bytes(std::span(to)));
  }
  const StateTensor& tensor = *tensors_.at(entry.name());
  if (is_sharded(entry)) return read_shard(reader, i, tensor);
  if (Status s = read_into(reader, i, memory_of(tensor)); !s.ok()) return s;
  // It may have been saved by a run that let it be anything.
  if (!tensor.must_be_finite || !entry.may_be_non_finite() || scan(tensor.view()).finite()) return Status();
  return Status::internal(printable(tensor.name) + " holds what is not finite, and must not in this run");
}

Status GenerationLoader::read_shard(PartReader& reader, int i, const StateTensor& tensor) {
  const TensorEntry& entry = reader.tensor(i);
  const Range theirs = range_of(entry);
  const Range mine = range_of(tensor);
  if (theirs.begin == mine.begin && theirs.end == mine.end) return read_into(reader, i, memory_of(tensor));
  scratch_.resize(entry.bytes());
  if (Status s = read_into(reader, i, scratch_); !s.ok()) return s;
  const std::uint64_t width = safetensors_dtype_size(entry.dtype());
  const Range common = overlap(theirs, mine);
  std::memcpy(static_cast<std::byte*>(tensor.data) + (common.begin - mine.begin) * width,
              scratch_.data() + (common.begin - theirs.begin) * width, (common.end - common.begin) * width);
  return Status();
}

Status GenerationLoader::read_into(PartReader& reader, int i, std::span<std::byte> to) {
  std::optional<NonFinite> finding;
  return reader.read_tensor(i, to, &finding);
}

Status GenerationLoader::load_bytes() const {
  for (const auto& [name, bytes] : read_bytes_) {
    const auto failed = [&, &shown = name](const std::string& why) {
      return "loading " + printable(shown) + " failed: " + why;
    };
    try {
      if (Status s = bytes_.at(name)->load(bytes); !s.ok()) return Status::usage(failed(s.message()));
    } catch (const std::exception& e) {
      return Status::internal(failed(printable(e.what())));
    } catch (...) {
      return Status::internal(failed("an exception of an unknown type"));
    }
  }
  return Status();
}

}  // namespace holdfast
