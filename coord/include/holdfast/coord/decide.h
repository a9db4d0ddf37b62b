// Rank 0's choice for an attempt that is not clean: a pure function of the policy, the budget and the
// incident.
#pragma once

#include <cstdint>

#include "holdfast/coord/budget.h"
#include "holdfast/coord/decision.h"
#include "holdfast/coord/incident.h"

namespace holdfast {

class Policy;

// Whether a halved loss scale may cure this attempt, so that what its skip was shows when the streak ends.
bool is_pending(const Incident& incident);

// Whether such a skip is one that loss scaling is expected to make: see Policy.LossScale.
bool is_calibration(const Policy& policy, const Incident& incident);

// `budget` is as it was before this attempt, and so is `pending_defects`: the skips of a running streak that
// will be charged to it. Never returns APPLY; ROLL_BACK only when `can_roll_back`.
Decision decide(const Policy& policy, const SkipBudget& budget, const Incident& incident,
                std::uint64_t pending_defects = 0, bool can_roll_back = false);

}  // namespace holdfast
