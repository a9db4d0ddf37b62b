// How the epochs of a run ended, and whether it may go on after that.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "holdfast/collectives/status.h"
#include "holdfast/coord/incident.h"

namespace holdfast {

class Policy;
class RunState;
class Hold;

// Whether a run that ended so is not restarted before somebody has acknowledged it: 81, 82, 83 and 85. By
// policy or because its state can no longer be trusted, it would fail again, or go on and hide what happened.
// After 80 and 84 (an exception, a lost host) a restart is what helps; what does not, max_identical_failures
// ends.
bool needs_acknowledgement(StatusCode code);

// Puts on record in `state` that its epoch ended with `code` at its attempt, by `incident` (null for none),
// and holds the run when that calls for it. Gives the number of identical failures in a row, this one
// included; 0 for what is no failure (0 and 86). When they are too many and there is a checkpoint older than
// the one the epoch began with (`older_checkpoint`), the next start goes back to that; when they are as many
// again, or there is none, the run is not to be requeued.
std::uint64_t add_ending(const Policy& policy, StatusCode code, const std::string& reason,
                         const Incident* incident, bool older_checkpoint, RunState* state);

// The epoch ended without a word: killed, cut off or stuck.
void add_unknown_ending(RunState* state);

// What to tell who restarts a run that is held; names who may order to go on.
std::string describe_hold(const Policy& policy, const std::string& run_dir, const Hold& hold);

// Somebody has acknowledged it: the run may go on, and a row of too many identical failures begins anew.
void release_hold(RunState* state);

}  // namespace holdfast
