#include "holdfast/replica_groups.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "holdfast/coord/printable.h"

namespace holdfast {
namespace {

using Json = nlohmann::json;

// Along this axis ranks hold the same, of other samples.
constexpr std::string_view kReplicaAxis = "dp";

// What a rank says of itself: {"name": "pp=1,tp=0", "kind": "dp,pp,tp"}. The kind must be the same on all
// ranks.
Bytes claim(const std::map<std::string, int>& axes, const std::optional<int>& override_group) {
  if (override_group)
    return Json{{"name", std::to_string(*override_group)}, {"kind", "a replica group"}}.dump();
  std::vector<std::string> tags;
  std::vector<std::string> named;
  for (const auto& [axis, index] : axes) {
    named.push_back(printable(axis));
    if (axis != kReplicaAxis) tags.push_back(fmt::format("{}={}", named.back(), index));
  }
  const std::string kind = named.empty() ? "no axes" : fmt::format("the axes {}", fmt::join(named, ","));
  return Json{{"name", fmt::format("{}", fmt::join(tags, ","))}, {"kind", kind}}.dump();
}

// On rank 0: {"names": [...], "group_of": [...]}.
Status divide(const std::vector<Bytes>& claims, Bytes* division) {
  std::map<std::string, int> numbers;
  std::vector<std::string> names;
  std::vector<int> group_of;
  std::string kind_of_rank_0;
  for (std::size_t r = 0; r < claims.size(); ++r) {
    const Json said = Json::parse(claims[r], nullptr, false);
    if (!said.is_object()) return Status::internal(fmt::format("malformed axes of rank {}", r));
    const std::string name = said.value("name", "");
    const std::string kind = said.value("kind", "");
    if (r == 0) kind_of_rank_0 = kind;
    if (kind != kind_of_rank_0) {
      return {
          StatusCode::kRanksDisagree,
          fmt::format(
              "rank {} names {} and rank 0 {}: every rank must name the same, or it would be compared with "
              "nobody",
              r, kind, kind_of_rank_0)};
    }
    const auto [at, is_new] = numbers.try_emplace(name, static_cast<int>(names.size()));
    if (is_new) names.push_back(name);
    group_of.push_back(at->second);
  }
  if (names.size() == 1) names.front().clear();
  *division = Json{{"names", names}, {"group_of", group_of}}.dump();
  return Status();
}

}  // namespace

Status ReplicaGroups::agree(Collective& collective, const std::map<std::string, int>& axes,
                            const std::optional<int>& override_group, ReplicaGroups* out) {
  std::vector<Bytes> claims;
  if (Status s = collective.gather(claim(axes, override_group), &claims); !s.ok()) return s;
  Bytes division;
  const Status mine = collective.rank() == 0 ? divide(claims, &division) : Status();
  if (Status s = agree_on_status(collective, mine); !s.ok()) return s;
  if (Status s = collective.broadcast(&division); !s.ok()) return s;
  const Json told = Json::parse(division, nullptr, false);
  try {
    told.at("names").get_to(out->names_);
    told.at("group_of").get_to(out->group_of_);
  } catch (const Json::exception&) {
    return Status::internal("malformed replica groups from rank 0");
  }
  const bool sound = out->group_of_.size() == static_cast<std::size_t>(collective.size()) &&
                     std::ranges::all_of(out->group_of_, [&](int g) { return g >= 0 && g < out->groups(); });
  return sound ? Status() : Status::internal("malformed replica groups from rank 0");
}

std::vector<int> ReplicaGroups::members(int group) const {
  std::vector<int> members;
  for (std::size_t r = 0; r < group_of_.size(); ++r) {
    if (group_of_[r] == group) members.push_back(static_cast<int>(r));
  }
  return members;
}

int ReplicaGroups::first(int group) const {
  return static_cast<int>(std::ranges::find(group_of_, group) - group_of_.begin());
}

}  // namespace holdfast
