#include "holdfast/coord/cross_examination.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>

#include "holdfast/collectives/topology.h"
#include "holdfast/coord/evidence/evidence.pb.h"
#include "holdfast/coord/incident.h"

namespace holdfast {
namespace {

bool both_known_and_differ(const std::string& a, const std::string& b) {
  return !a.empty() && !b.empty() && a != b;
}

CrossExamination::Where where(const RankPlacement& origin, const RankPlacement& examiner) {
  if (examiner.host != origin.host) return CrossExamination::OTHER_HOST;
  const bool other_device = both_known_and_differ(origin.gpu_uuid, examiner.gpu_uuid) ||
                            both_known_and_differ(origin.gpu_pci, examiner.gpu_pci);
  return other_device ? CrossExamination::OTHER_DEVICE : CrossExamination::SAME_HOST;
}

// Only who has the same parameters can make the same attempt.
bool are_replicas(const Incident& incident, int a, int b) {
  const auto name = [&](int rank) -> std::string_view {
    const auto at = static_cast<std::size_t>(rank);
    return at < incident.replica_groups.size() ? incident.replica_groups[at] : std::string_view();
  };
  return name(a) == name(b);
}

// Why this rank has not made the attempt again; "" when it has. What it found before it failed counts.
std::string why_not(const char* who, const EvidencePart* part) {
  if (part == nullptr) return fmt::format("the {} sent nothing", who);
  if (part->rerun_agrees()) return "";
  if (!part->failure().empty())
    return fmt::format("rank {} could not make the attempt again: {}", part->rank(), part->failure());
  return part->reran() ? "" : fmt::format("rank {} did not make the attempt again", part->rank());
}

}  // namespace

int choose_examiner(const Topology& topology, const Incident& incident, int origin) {
  const RankPlacement* from = topology.find(origin);
  if (from == nullptr) return -1;
  const std::vector<Origin> origins = incident.origins();
  std::optional<std::tuple<bool, int, int>> best;
  for (const RankPlacement& place : topology.placements()) {
    if (place.rank == origin || !are_replicas(incident, origin, place.rank)) continue;
    const bool is_origin = std::ranges::find(origins, place.rank, &Origin::rank) != origins.end();
    const std::tuple candidate(is_origin, static_cast<int>(where(*from, place)), place.rank);
    if (!best || candidate < *best) best = candidate;
  }
  return best ? std::get<2>(*best) : -1;
}

void describe_examination(const Topology& topology, int origin, int examiner, CrossExamination* to) {
  const RankPlacement* from = topology.find(origin);
  const RankPlacement* by = topology.find(examiner);
  to->set_origin(origin);
  if (from != nullptr) {
    to->set_origin_host(from->host);
    to->set_origin_device(from->device());
  }
  if (by == nullptr) return;
  to->set_examiner(examiner);
  to->set_examiner_host(by->host);
  to->set_examiner_device(by->device());
  if (from != nullptr) to->set_where(where(*from, *by));
}

void judge_examination(const EvidencePart* origin, const EvidencePart* examiner, CrossExamination* to) {
  if (examiner != nullptr) {
    *to->mutable_layers() = examiner->layers();
    if (examiner->has_last_clean()) to->set_last_clean(examiner->last_clean());
    if (examiner->has_first_dirty()) to->set_first_dirty(examiner->first_dirty());
  }
  std::string why = why_not("origin", origin);
  if (why.empty()) why = why_not("examiner", examiner);
  if (!why.empty()) {
    to->set_outcome(CrossExamination::NOT_EXAMINED);
    to->set_why(why);
    return;
  }
  to->set_origin_found(origin->rerun_agrees());
  to->set_examiner_found(examiner->rerun_agrees());
  if (to->origin_found()) {
    to->set_outcome(to->examiner_found() ? CrossExamination::DATA_OR_MODEL
                                         : CrossExamination::SUSPECT_DEVICE);
  } else {
    to->set_outcome(to->examiner_found() ? CrossExamination::INCONCLUSIVE : CrossExamination::TRANSIENT);
  }
}

}  // namespace holdfast
