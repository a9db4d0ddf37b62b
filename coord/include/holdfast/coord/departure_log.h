// RUN_DIR/departures.jsonl: who was missing when a job left with exit code 84.
#pragma once

#include <string>

#include "holdfast/collectives/departure.h"
#include "holdfast/collectives/status.h"

namespace holdfast {

// Appends one line. Called by the rank that reports, which need not be rank 0: the run folder has to be on a
// file system that all hosts share for a deputy's or a lonely rank's line to be found with the rest.
//
//   {"event": "departure", "time", "reported_by", "alone", "epoch",
//    "missing": [{rank, host, pid, absence, epoch, attempt, phase}],
//    "survivors": [{rank, host, pid, epoch, attempt, phase}],
//    "transport_failure": "rank 1: ..."}
//
// epoch, attempt and phase are null for a rank that never said where it was. The line's own epoch is the
// newest that a rank was at, null before the first attempt. transport_failure is there when a trainer or a
// watchdog found one, see Departure.
//
// A run that was cut off may append its line after another has taken the folder over: whose it is is told by
// rank 0's process, where it is named, which is the holder's, and by the epoch.
Status append_departure(const std::string& run_dir, const Departure& departure);

}  // namespace holdfast
