#include "sharded_arrays.h"

#include <fmt/format.h>

#include <algorithm>

#include "holdfast/coord/printable.h"
#include "holdfast/coord/storage/safetensors.h"

namespace holdfast {
namespace {

// Of a group and a name.
std::string shown(const std::pair<std::string, std::string>& key) {
  const std::string name = "sharded " + printable(key.second);
  return key.first.empty() ? name : name + " of replica group " + printable(key.first);
}

}  // namespace

std::uint64_t stored_elements(const TensorEntry& entry) {
  const std::uint64_t width = safetensors_dtype_size(entry.dtype());
  return width == 0 ? 0 : entry.bytes() / width;
}

ShardedArrays ShardedArrays::of(const Manifest& manifest) {
  ShardedArrays arrays;
  for (const Part& part : manifest.parts()) {
    const std::string group = part.has_group() ? manifest.groups(static_cast<int>(part.group())) : "";
    for (const TensorEntry& entry : part.tensors()) {
      if (entry.has_shard_total()) arrays.add(entry, part.rank(), group);
    }
  }
  return arrays;
}

void ShardedArrays::add(const TensorEntry& entry, int rank, const std::string& group) {
  const auto [at, is_new] = arrays_.try_emplace({group, entry.name()});
  Array& array = at->second;
  if (is_new) {
    array.dtype = entry.dtype();
    array.total = entry.shard_total();
  } else if (array.conflict.empty() && (array.dtype != entry.dtype() || array.total != entry.shard_total())) {
    array.conflict =
        fmt::format("rank {} holds a part of {} x {} and rank {} one of {} x {}", array.shards.front().rank,
                    array.total, array.dtype, rank, entry.shard_total(), entry.dtype());
  }
  array.shards.push_back({entry.shard_offset(), stored_elements(entry), rank});
}

std::string ShardedArrays::Array::fault() const {
  if (!conflict.empty()) return conflict;
  std::vector<Shard> sorted;
  for (const Shard& shard : shards) {
    if (shard.offset > total || shard.elements > total - shard.offset) {
      return fmt::format("rank {} holds elements beyond its {}", shard.rank, total);
    }
    if (shard.elements > 0) sorted.push_back(shard);
  }
  std::ranges::sort(sorted, {}, &Shard::offset);
  std::uint64_t covered = 0;
  for (const Shard& shard : sorted) {
    if (shard.offset < covered)
      return fmt::format("element {} is held twice, by rank {} too", shard.offset, shard.rank);
    if (shard.offset > covered) break;
    covered += shard.elements;
  }
  return covered == total ? "" : fmt::format("element {} of {} is held by no rank", covered, total);
}

std::string ShardedArrays::Array::kind() const { return fmt::format("{} x {}", total, dtype); }

std::string ShardedArrays::fault() const {
  for (const auto& [key, array] : arrays_) {
    if (const std::string why = array.fault(); !why.empty()) return shown(key) + ": " + why;
  }
  return "";
}

std::string ShardedArrays::difference(const ShardedArrays& other, const std::string& mine,
                                      const std::string& others) const {
  for (const auto& [key, array] : arrays_) {
    const auto at = other.arrays_.find(key);
    if (at == other.arrays_.end()) return fmt::format("{} is in {} and not in {}", shown(key), mine, others);
    if (at->second.kind() != array.kind()) {
      return fmt::format("{} is {} in {} and {} in {}", shown(key), array.kind(), mine, at->second.kind(),
                         others);
    }
  }
  for (const auto& [key, array] : other.arrays_) {
    if (!arrays_.contains(key)) return fmt::format("{} is in {} and not in {}", shown(key), others, mine);
  }
  return "";
}

}  // namespace holdfast
