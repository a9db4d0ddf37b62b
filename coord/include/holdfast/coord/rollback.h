// Whether going back to a checkpoint makes sense once more, and to which.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "holdfast/collectives/status.h"
#include "holdfast/coord/generation_id.h"
#include "holdfast/coord/incident.h"

namespace holdfast {

class Policy;
class RunState;

struct RollbackChoice {
  std::optional<GenerationId> to;  // none: the run ends, by `code` and `why`
  StatusCode code = StatusCode::kOk;
  std::string why;
  bool do_not_requeue = false;
};

// Counts a rollback for `incident` in `state`, and chooses among `generations`, oldest first: the newest,
// unless the same failure has come back max_identical_failures times. Two failures are the same when stage
// and tensor are, and the attempt, or the number of attempts since the last restore. `restored_at` is the
// attempt that the state began with.
RollbackChoice choose_rollback(const Policy& policy, const Incident& incident, std::uint64_t restored_at,
                               std::span<const GenerationId> generations, RunState* state);

// The newest that is older than `before`.
std::optional<GenerationId> newest_before(std::span<const GenerationId> generations, std::uint64_t before);

}  // namespace holdfast
