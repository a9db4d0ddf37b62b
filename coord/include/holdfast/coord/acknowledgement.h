// Somebody takes the responsibility for going on after an abort.
#pragma once

#include <string>

#include "holdfast/collectives/status.h"

namespace holdfast {

struct Acknowledgement {
  std::string owner;   // who it is; not empty
  std::string note;    // what was found; not empty
  std::string ticket;  // where it is followed up; may be empty
};

// Puts it into the record of the run (event `acknowledged`) and lets the run be resumed. Local, for one
// process that holds no lock on the folder. `*what`, when it succeeds, says in one printable line what was
// acknowledged. USAGE when owner or note is blank, when there is nothing to acknowledge, when a live run
// holds the folder, or its memory cannot be read; INTERNAL when it cannot be put on record. The run is then
// held as before.
Status acknowledge(const std::string& run_dir, const Acknowledgement& acknowledgement, std::string* what);

}  // namespace holdfast
