#include "incident_json.h"

#include "holdfast/coord/event_log.h"
#include "holdfast/coord/policy.pb.h"

namespace holdfast {
namespace {

using Json = nlohmann::ordered_json;

void put_counts(Json& json, const BadCounts& counts) {
  json["nan"] = counts.nan;
  json["pos_inf"] = counts.pos_inf;
  json["neg_inf"] = counts.neg_inf;
}

Json placement_json(const RankPlacement& place) {
  Json json = {{"pid", place.pid},   {"local_rank", place.local_rank}, {"cpus", place.cpus},
               {"numa", place.numa}, {"gpu_uuid", place.gpu_uuid},     {"gpu_pci", place.gpu_pci}};
  json["axes"] = Json::object();
  for (const auto& [axis, index] : place.axes) json["axes"][axis] = index;
  return json;
}

// The loss of the first origin, or of the first rank that reported one: as it is, never patched.
Json loss_json(const Incident& incident, const std::vector<Origin>& origins) {
  const int wanted = origins.empty() ? -1 : origins.front().rank;
  const RankView* chosen = nullptr;
  for (const RankView& view : incident.views) {
    if (view.has_loss && (chosen == nullptr || view.rank == wanted)) chosen = &view;
  }
  return chosen == nullptr ? Json(nullptr) : json_number(chosen->loss);
}

// Where the rank runs, and whether its device has been the origin too often.
Json origin_json(const Origin& origin, const Topology& topology, const Suspects& suspects) {
  Json json = {{"rank", origin.rank},
               {"host", origin.host},
               {"stage", stage_name(origin.finding.stage)},
               {"tensor", origin.finding.tensor},
               {"index", origin.finding.index}};
  put_counts(json, origin.counts);
  json["micro_batch"] = origin.finding.micro_batch < 0 ? Json(nullptr) : Json(origin.finding.micro_batch);
  json["facts"] = Json::object();
  for (const Fact& fact : origin.facts) json["facts"][fact.name] = fact.value;
  if (const RankPlacement* place = topology.find(origin.rank)) {
    json["device"] = place->device();
    json["hardware_suspect"] = suspects.is_suspect(place->device());
    json["placement"] = placement_json(*place);
  }
  return json;
}

}  // namespace

const std::string& stage_owner(const Policy& policy, Stage stage) {
  const Policy::StageOwners& owners = policy.stage_owners();
  switch (stage) {
    case Stage::kInput: return owners.input();
    case Stage::kForward: return owners.forward();
    case Stage::kLoss: return owners.loss();
    case Stage::kBackward: return owners.backward();
    case Stage::kReduction: return owners.reduction();
    case Stage::kOptimizer: return owners.optimizer();
  }
  return policy.owner();
}

Json place_json(std::uint64_t epoch, std::uint64_t attempt, std::uint64_t update) {
  return {{"epoch", epoch}, {"attempt", attempt}, {"update", update}};
}

// Who may order what, as far as the policy says.
void put_authorities(const Policy& policy, Json* json) {
  const Policy::Authorities& who = policy.authorities();
  Json named = Json::object();
  if (!who.rollback().empty()) named["rollback"] = who.rollback();
  if (!who.quarantine().empty()) named["quarantine"] = who.quarantine();
  if (!who.resume().empty()) named["resume"] = who.resume();
  if (!who.data_remediation().empty()) named["data_remediation"] = who.data_remediation();
  if (!named.empty()) (*json)["authorities"] = std::move(named);
}

Json incident_json(const Incident& incident, const Policy& policy, const Topology& topology,
                   const Suspects& suspects) {
  const std::vector<Origin> origins = incident.origins();
  Json json = place_json(incident.epoch, incident.attempt, incident.update);
  const auto stage = incident.stage();
  json["stage"] = stage ? Json(stage_name(*stage)) : Json(nullptr);
  if (stage && !stage_owner(policy, *stage).empty()) json["stage_owner"] = stage_owner(policy, *stage);
  put_authorities(policy, &json);
  put_counts(json, incident.counts());
  json["loss"] = loss_json(incident, origins);
  if (incident.loss_scale) json["loss_scale"] = incident.loss_scale->scale;
  if (const RankView* view = incident.first_error()) {
    json["error"] = {{"rank", view->rank},
                     {"host", view->host},
                     {"stage", stage_name(view->error->stage)},
                     {"what", view->error->what}};
  }
  json["origins"] = Json::array();
  for (std::size_t i = 0; i < origins.size() && i < kMostOriginsKept; ++i) {
    json["origins"].push_back(origin_json(origins[i], topology, suspects));
  }
  if (origins.size() > kMostOriginsKept) json["origins_omitted"] = origins.size() - kMostOriginsKept;
  return json;
}

}  // namespace holdfast
