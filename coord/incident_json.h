// The fields of an incident's event.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>

#include "holdfast/collectives/topology.h"
#include "holdfast/coord/incident.h"
#include "holdfast/coord/suspects.h"

namespace holdfast {

class Policy;

// Where in the run an event happened: what each of them begins with.
nlohmann::ordered_json place_json(std::uint64_t epoch, std::uint64_t attempt, std::uint64_t update);

// Of thousands of bad ranks, the first ones say it: origins in an event, and in a bundle.
inline constexpr std::size_t kMostOriginsKept = 64;

// Who looks after it; "" for nobody.
const std::string& stage_owner(const Policy& policy, Stage stage);

// Who may order what, as far as the policy says.
void put_authorities(const Policy& policy, nlohmann::ordered_json* json);

// All but what was decided and counted.
nlohmann::ordered_json incident_json(const Incident& incident, const Policy& policy, const Topology& topology,
                                     const Suspects& suspects);

}  // namespace holdfast
