// Whether the ranks of a replica group hold the same tensors.
#pragma once

#include <span>

#include "holdfast/collectives/collective.h"
#include "holdfast/replica_groups.h"
#include "holdfast/step_guard.h"

namespace holdfast {

// See StepGuard::agree_on_layout().
Status agree_on_layout(Collective& collective, std::span<const BucketSlice> layout,
                       const ReplicaGroups& groups);

}  // namespace holdfast
