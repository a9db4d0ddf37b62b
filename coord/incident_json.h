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

// Who may order what, as far as the policy says.
void put_authorities(const Policy& policy, nlohmann::ordered_json* json);

// All but what was decided and counted.
nlohmann::ordered_json incident_json(const Incident& incident, const Policy& policy, const Topology& topology,
                                     const Suspects& suspects);

}  // namespace holdfast
