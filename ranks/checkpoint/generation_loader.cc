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

// Of one rank's part, what is its own and no shard. An empty one when it has none.
Part per_rank_part(const Manifest& manifest, int rank) {
  Part own;
  for (const Part& part : manifest.parts()) {
    if (part.rank() != rank) continue;
    for (const TensorEntry& entry : part.tensors()) {
      if (!is_sharded(entry)) *own.add_tensors() = entry;
    }
  }
  return own;
}

Part replicated_part(const Manifest& manifest) { return per_rank_part(manifest, -1); }

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

Status check_match(const DeclaredState& mine, const Manifest& manifest, int rank, int ranks) {
  std::string why =
      difference(mine.replicated, replicated_part(manifest), "this run's state", "the generation");
  if (why.empty() && static_cast<int>(manifest.ranks()) != ranks)
    why = per_rank_obstacle(mine, manifest, ranks);
  if (why.empty() && static_cast<int>(manifest.ranks()) == ranks) {
    why = difference(mine.per_rank, per_rank_part(manifest, rank), "this rank's own state", "the generation");
  }
  return why.empty() ? Status() : Status::usage(why);
}

GenerationLoader::GenerationLoader(FileSystem& files, std::string folder, const Manifest& manifest,
                                   const TrainingState& state, int rank, int ranks)
    : files_(files),
      folder_(std::move(folder)),
      manifest_(manifest),
      rank_(rank),
      ranks_(static_cast<std::uint32_t>(ranks)) {
  for (const StateTensor& tensor : state.tensors()) tensors_[tensor.name] = &tensor;
  for (const StateBytes& bytes : state.bytes()) bytes_[bytes.name] = &bytes;
}

bool GenerationLoader::is_needed(const Part& part, const TensorEntry& entry) const {
  if (!is_sharded(entry)) return !part.has_rank() || (part.rank() == rank_ && manifest_.ranks() == ranks_);
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
