// How a run is doing, from the files of its folder: for people and programs beside it.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "holdfast/collectives/status.h"

namespace holdfast {

// Reads what there is; needs no lock and changes nothing. What cannot be read, such as a damaged file, is
// named in `problems`, and what would have been in it is null. USAGE when `run_dir` holds no run, or none
// that can be read.
//
//   run_dir, state: "running", "finished" (0), "stopped" (86), "aborted" or "gone" (no process holds the
//   folder, and
//     the record has no end: killed, cut off, or left with 84), holder of a live run, exit_code and reason of
//     the end
//   epoch, attempt (the next one), update, skips, calibration_skips, incidents, attempts_per_second,
//   replica_proofs (since the start, in which all replicas agreed),
//   loss_scale as_of: when a live run said so; the rest is as of its last skip or alert at least, see
//   RUN_DIR/state budgets: {total, consecutive: {left, limit}}; raised_alerts: names of rules last_incident:
//   an event, with its name, time, epoch, attempt, reason...; hold: what has to be acknowledged topology: the
//   map of the job; ranks: [{rank, host, pid, attempt, phase, seconds_ago}], those furthest behind when
//     they are many; departure: its last line in departures.jsonl, of a run that is gone
//   owner, ticket: of the policy
Status run_overview(const std::string& run_dir, nlohmann::ordered_json* overview);

}  // namespace holdfast
