// Rank 0's choice for an attempt that is not clean: a pure function of the policy, the budget and the
// incident.
#pragma once

#include "holdfast/coord/budget.h"
#include "holdfast/coord/decision.h"
#include "holdfast/coord/incident.h"

namespace holdfast {

class Policy;

// Whether a skip of this attempt is one that loss scaling is expected to make: see Policy.LossScale.
bool is_calibration(const Policy& policy, const Incident& incident);

// `budget` is as it was before this attempt. Never returns APPLY.
Decision decide(const Policy& policy, const SkipBudget& budget, const Incident& incident);

}  // namespace holdfast
