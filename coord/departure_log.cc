#include "holdfast/coord/departure_log.h"

#include <algorithm>

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

// Null before the first attempt. Of a run that was going back the ranks may be at two.
Json newest_epoch(const Departure& departure) {
  std::uint64_t newest = 0;
  for (const SurvivingRank& rank : departure.survivors) newest = std::max(newest, rank.place.epoch);
  for (const MissingRank& rank : departure.missing) {
    if (rank.last_seen) newest = std::max(newest, rank.last_seen->epoch);
  }
  return newest == 0 ? Json(nullptr) : Json(newest);
}

}  // namespace

Status append_departure(const std::string& run_dir, const Departure& departure) {
  Json fields = {{"reported_by", departure.reported_by}, {"alone", departure.alone}};
  fields["epoch"] = newest_epoch(departure);
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
  if (!departure.transport_failure.empty()) fields["transport_failure"] = departure.transport_failure;
  EventLog log;
  if (Status s = log.open(run_dir + "/departures.jsonl"); !s.ok()) return s;
  return log.append("departure", fields);
}

}  // namespace holdfast
