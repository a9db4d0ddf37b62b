#include "holdfast/coord/departure_log.h"

#include "holdfast/coord/event_log.h"

namespace holdfast {
namespace {

using Json = nlohmann::ordered_json;

Json rank_json(const RankIdentity& who, const std::optional<Place>& place) {
  Json json = {{"rank", who.rank}, {"host", who.host}, {"pid", who.pid}};
  json["epoch"] = place ? Json(place->epoch) : Json(nullptr);
  json["attempt"] = place ? Json(place->attempt) : Json(nullptr);
  json["phase"] = place ? Json(phase_name(place->phase)) : Json(nullptr);
  return json;
}

}  // namespace

Status append_departure(const std::string& run_dir, const Departure& departure) {
  Json fields = {{"reported_by", departure.reported_by}, {"alone", departure.alone}};
  fields["missing"] = Json::array();
  for (const MissingRank& rank : departure.missing) {
    Json json = rank_json(rank.who, rank.last_seen);
    json["absence"] = absence_name(rank.absence);
    fields["missing"].push_back(std::move(json));
  }
  fields["survivors"] = Json::array();
  for (const SurvivingRank& rank : departure.survivors) {
    fields["survivors"].push_back(rank_json(rank.who, rank.place));
  }
  EventLog log;
  if (Status s = log.open(run_dir + "/departures.jsonl"); !s.ok()) return s;
  return log.append("departure", fields);
}

}  // namespace holdfast
