#include "layout_agreement.h"

#include <xxhash.h>

#include <algorithm>
#include <map>
#include <vector>

namespace holdfast {
namespace {

// Of everything a layout is made of; the lengths of names keep neighbours apart.
std::uint64_t hash_of(std::span<const BucketSlice> layout) {
  std::string bytes;
  const auto add = [&](std::int64_t number) {
    for (int i = 0; i < 8; ++i) bytes.push_back(static_cast<char>(number >> (8 * i)));
  };
  for (const BucketSlice& slice : layout) {
    add(static_cast<std::int64_t>(slice.tensor.size()));
    bytes += slice.tensor;
    add(slice.offset);
    add(slice.count);
  }
  return XXH3_64bits(bytes.data(), bytes.size());
}

std::string ranks_text(const std::vector<int>& ranks) {
  constexpr std::size_t kMostNamed = 16;
  std::string text;
  for (std::size_t i = 0; i < ranks.size() && i < kMostNamed; ++i) {
    text += (i > 0 ? "," : "") + std::to_string(ranks[i]);
  }
  return ranks.size() > kMostNamed ? text + " and " + std::to_string(ranks.size() - kMostNamed) + " more"
                                   : text;
}

// On rank 0: hashes[r] is of rank r.
Status compare(const std::vector<Bytes>& hashes, const ReplicaGroups& groups) {
  std::vector<std::map<Bytes, std::vector<int>>> by_group(static_cast<std::size_t>(groups.groups()));
  for (int r = 0; r < std::ssize(hashes); ++r) {
    by_group[static_cast<std::size_t>(groups.group_of(r))][hashes[static_cast<std::size_t>(r)]].push_back(r);
  }
  for (int group = 0; group < groups.groups(); ++group) {
    const auto& by_hash = by_group[static_cast<std::size_t>(group)];
    if (by_hash.size() == 1) continue;
    std::vector<std::vector<int>> camps;
    for (const auto& [hash, ranks] : by_hash) camps.push_back(ranks);
    std::ranges::stable_sort(camps, {}, &std::vector<int>::size);
    std::string text = "ranks hold different tensors: rank " + ranks_text(camps.front());
    for (std::size_t i = 1; i < camps.size(); ++i) text += " against rank " + ranks_text(camps[i]);
    if (!groups.only_one()) text += " (replica group " + groups.name(group) + ")";
    return {StatusCode::kRanksDisagree, text};
  }
  return Status();
}

}  // namespace

Status agree_on_layout(Collective& collective, std::span<const BucketSlice> layout,
                       const ReplicaGroups& groups) {
  std::vector<Bytes> hashes;
  if (Status s = collective.gather(std::to_string(hash_of(layout)), &hashes); !s.ok()) return s;
  return agree_on_status(collective, collective.rank() == 0 ? compare(hashes, groups) : Status());
}

}  // namespace holdfast
