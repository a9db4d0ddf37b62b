#include "holdfast/coord/incident.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "holdfast/coord/incident.pb.h"

namespace holdfast {

std::string encode_rank_view(const RankView& view) {
  RankReport report;
  report.set_rank(view.rank);
  report.set_host(view.host);
  for (const Finding& finding : view.findings) {
    FindingMessage* message = report.add_findings();
    message->set_stage(static_cast<int>(finding.stage));
    message->set_tensor(finding.tensor);
    message->set_index(finding.index);
    message->set_nan(finding.counts.nan);
    message->set_pos_inf(finding.counts.pos_inf);
    message->set_neg_inf(finding.counts.neg_inf);
    message->set_micro_batch(finding.micro_batch);
  }
  if (view.error) {
    report.set_error_stage(static_cast<int>(view.error->stage));
    report.set_error(view.error->what);
  }
  if (view.has_loss) report.set_loss(view.loss);
  report.set_epoch(view.agreement.epoch);
  report.set_attempt(view.agreement.attempt);
  report.set_policy_hash(view.agreement.policy_hash);
  for (const Fact& fact : view.facts) {
    FactMessage* message = report.add_facts();
    message->set_name(fact.name);
    message->set_value(fact.value);
  }
  if (!view.fired_rule.empty()) report.set_fired_rule(view.fired_rule);
  report.mutable_replica_digests()->Assign(view.replica_digests.begin(), view.replica_digests.end());
  for (const std::string& name : view.proven_tensors) report.add_proven_tensors(name);
  return report.SerializeAsString();
}

namespace {
bool is_stage(int number) { return number >= 0 && number < kStageCount; }
}  // namespace

bool decode_rank_view(const std::string& bytes, RankView* view) {
  RankReport report;
  if (!report.ParseFromString(bytes) || !is_stage(report.error_stage())) return false;
  *view = RankView();
  view->rank = report.rank();
  view->host = report.host();
  for (const FindingMessage& message : report.findings()) {
    if (!is_stage(message.stage())) return false;
    view->findings.push_back({static_cast<Stage>(message.stage()), message.tensor(), message.index(),
                              BadCounts{message.nan(), message.pos_inf(), message.neg_inf()},
                              message.micro_batch()});
  }
  if (report.has_error()) view->error = {static_cast<Stage>(report.error_stage()), report.error()};
  view->has_loss = report.has_loss();
  if (view->has_loss) view->loss = report.loss();
  view->agreement = {report.epoch(), report.attempt(), report.policy_hash()};
  for (const FactMessage& message : report.facts()) view->facts.push_back({message.name(), message.value()});
  view->fired_rule = report.fired_rule();
  view->replica_digests.assign(report.replica_digests().begin(), report.replica_digests().end());
  view->proven_tensors.assign(report.proven_tensors().begin(), report.proven_tensors().end());
  return true;
}

std::vector<Origin> Incident::origins() const {
  std::vector<Origin> origins;
  const std::optional<Stage> at = stage();
  for (const RankView& view : views) {
    const Finding* first = nullptr;
    BadCounts counts;
    for (const Finding& finding : view.findings) {
      if (finding.stage != at) continue;
      if (first == nullptr) first = &finding;
      counts += finding.counts;
    }
    if (first != nullptr) origins.push_back({view.rank, view.host, *first, counts, view.facts});
  }
  return origins;
}

std::string Incident::fired_rule() const {
  for (const RankView& view : views) {
    if (!view.fired_rule.empty()) return view.fired_rule;
  }
  return {};
}

const RankView* Incident::first_error() const {
  for (const RankView& view : views) {
    if (view.error) return &view;
  }
  return nullptr;
}

std::optional<Stage> Incident::stage() const {
  if (verdict.kind == Verdict::Kind::kUpdateFailed) return Stage::kOptimizer;
  if (verdict.earliest_stage) return verdict.earliest_stage;
  if (const RankView* view = first_error()) return view->error->stage;
  return std::nullopt;
}

// Every rank scans the whole of what its update wrote, since a write can go wrong on one rank alone. Where
// the views that came in are alike and the sum divides evenly, it was one finding, N times.
BadCounts Incident::counts() const {
  const std::optional<Stage> at = stage();
  BadCounts counts = at ? verdict.sum.bad(*at) : BadCounts();
  const std::uint64_t ranks = verdict.sum.participants();
  const bool on_all = verdict.sum.updates_failed() == ranks && first_error() == nullptr;
  if (verdict.kind != Verdict::Kind::kUpdateFailed || !on_all) return counts;
  const std::vector<Origin> found = origins();
  const bool alike = std::ranges::all_of(found, [&](const Origin& origin) {
    const Origin& first = found.front();
    return origin.finding.tensor == first.finding.tensor && origin.finding.index == first.finding.index &&
           origin.counts == first.counts;
  });
  const bool even = counts.nan % ranks == 0 && counts.pos_inf % ranks == 0 && counts.neg_inf % ranks == 0;
  if (found.empty() || !alike || !even) return counts;
  return {counts.nan / ranks, counts.pos_inf / ranks, counts.neg_inf / ranks};
}

namespace {

// Replicas that hold the same.
struct Camp {
  const std::vector<std::uint64_t>* digests;
  std::vector<const RankView*> members;
};

std::vector<Camp> camps_of(const std::vector<const RankView*>& views) {
  std::vector<Camp> camps;
  for (const RankView* view : views) {
    const auto found =
        std::ranges::find_if(camps, [&](const Camp& camp) { return *camp.digests == view->replica_digests; });
    (found == camps.end() ? camps.emplace_back(Camp{&view->replica_digests, {}}) : *found)
        .members.push_back(view);
  }
  std::ranges::stable_sort(camps, {}, [](const Camp& camp) { return camp.members.size(); });
  return camps;
}

// Of one group: "rank 2 (host h) against the other 3, first in conv1.weight"; "" when its ranks hold the
// same. `tensors`: what was proven, unless a view of the group says it.
std::string difference_among(const std::vector<const RankView*>& views,
                             const std::vector<std::string>& tensors) {
  const std::vector<Camp> camps = camps_of(views);
  if (camps.size() < 2) return "";
  const Camp& last = camps.back();
  const bool majority = last.members.size() > camps[camps.size() - 2].members.size();
  std::string text;
  constexpr std::size_t kMostNamed = 16;
  std::size_t named = 0;
  for (const Camp& camp : camps) {
    if (majority && &camp == &last) break;
    for (const RankView* view : camp.members) {
      if (named < kMostNamed)
        text += fmt::format("{}rank {} (host {})", named == 0 ? "" : ", ", view->rank, view->host);
      ++named;
    }
  }
  if (named > kMostNamed) text += fmt::format(" and {} more", named - kMostNamed);
  text += majority ? fmt::format(" against the other {}", last.members.size()) : " against each other";
  const auto told =
      std::ranges::find_if(views, [](const RankView* view) { return !view->proven_tensors.empty(); });
  const std::vector<std::string>& names = told == views.end() ? tensors : (*told)->proven_tensors;
  const auto& one = *camps.front().digests;
  for (std::size_t i = 0; i < one.size() && i < last.digests->size() && i < names.size(); ++i) {
    if (one[i] != (*last.digests)[i]) return text + ", first in " + names[i];
  }
  return text;
}

}  // namespace

std::string Incident::describe_divergence() const {
  constexpr std::size_t kMostGroups = 8;
  std::map<std::string_view, std::vector<const RankView*>> groups;
  for (const RankView& view : views) {
    const auto at = static_cast<std::size_t>(view.rank);
    const bool grouped = view.rank >= 0 && at < replica_groups.size();
    groups[grouped ? std::string_view(replica_groups[at]) : ""].push_back(&view);
  }
  std::string text;
  std::size_t differ = 0;
  for (const auto& [name, members] : groups) {
    const std::string what = difference_among(members, proven_tensors);
    if (what.empty() || ++differ > kMostGroups) continue;
    text += fmt::format("{}{}: {}", differ == 1 ? "replicas differ" : "; and",
                        name.empty() ? "" : fmt::format(" in {}", name), what);
  }
  if (differ > kMostGroups) text += fmt::format("; and in {} more groups", differ - kMostGroups);
  return differ == 0 ? "replicas differ, and no rank's report says where" : text;
}

std::string Incident::describe() const {
  if (verdict.kind == Verdict::Kind::kDiverged) return describe_divergence();
  const std::vector<Origin> found = origins();
  const std::uint64_t total = counts().total();
  if (total > 0) {
    std::string text =
        fmt::format("{} non-finite value{} at {}", total, total == 1 ? "" : "s", stage_name(*stage()));
    if (!found.empty()) {
      const Origin& first = found.front();
      text += fmt::format(", first on rank {} (host {}) in {}[{}]", first.rank, first.host,
                          first.finding.tensor, first.finding.index);
    }
    if (found.size() > 1) text += fmt::format(" and on {} more", found.size() - 1);
    return text;
  }
  const std::string rule = fired_rule();
  return first_error() == nullptr && !rule.empty() ? rule : describe_error();
}

std::string Incident::describe_error() const {
  const RankView* view = first_error();
  if (view == nullptr) return "no rank reported what it saw";
  return fmt::format("exception on rank {} (host {}) at {}: {}", view->rank, view->host,
                     stage_name(view->error->stage), view->error->what);
}

}  // namespace holdfast
