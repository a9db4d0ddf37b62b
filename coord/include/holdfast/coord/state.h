// RUN_DIR/state: what rank 0 remembers of a run across restarts. The message is coord/state.proto.
#pragma once

#include <string>

#include "holdfast/collectives/status.h"

namespace holdfast {

class RunState;

inline constexpr unsigned kStateVersion = 1;

std::string state_path(const std::string& run_dir);

// Reads and checks it; needs no lock, since the file is only ever replaced as a whole. USAGE when there is
// none and when it is damaged, cut off or of another version, with the file, the reason and what to do. Never
// gives a state that was not written so.
Status read_state(const std::string& run_dir, RunState* state);

// Who has taken the run over from `mine`, which holds it, by the state on disk: its holder and epoch. "" when
// nobody has, or when there is no state to read.
std::string taken_over_by(const std::string& run_dir, const RunState& mine);

// Replaces it, durably, mode 0600. Only who holds the run folder's lock may. RANKS_DISAGREE when another run
// has taken over; INTERNAL, with the reason, on failure. Either way the state on disk stays, unless it
// was replaced and could only not be made durable.
Status write_state(const std::string& run_dir, const RunState& state);

// The first write of a run: afterwards none that had the folder before can replace it any more, not even one
// that was stopped in the middle of a write_state() and wakes up.
Status claim_state(const std::string& run_dir, const RunState& state);

}  // namespace holdfast
