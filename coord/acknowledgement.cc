#include "holdfast/coord/acknowledgement.h"

#include <fmt/format.h>

#include "holdfast/coord/event_log.h"
#include "holdfast/coord/history.h"
#include "holdfast/coord/printable.h"
#include "holdfast/coord/run_folder.h"
#include "holdfast/coord/state.h"
#include "holdfast/coord/state.pb.h"

namespace holdfast {
namespace {

bool is_blank(const std::string& text) { return text.find_first_not_of(" \t\r\n") == std::string::npos; }

nlohmann::ordered_json event_of(const RunState& state, const Acknowledgement& acknowledgement) {
  const Hold& hold = state.hold();
  nlohmann::ordered_json fields = {{"epoch", hold.epoch()},          {"attempt", hold.attempt()},
                                   {"update", state.update()},       {"exit_code", hold.exit_code()},
                                   {"owner", acknowledgement.owner}, {"note", acknowledgement.note}};
  if (!acknowledgement.ticket.empty()) fields["ticket"] = acknowledgement.ticket;
  if (hold.has_identical_failures()) fields["identical_failures"] = hold.identical_failures();
  return fields;
}

}  // namespace

Status acknowledge(const std::string& run_dir, const Acknowledgement& acknowledgement, std::string* what) {
  if (is_blank(acknowledgement.owner)) return Status::usage("who acknowledges it? The owner is empty");
  if (is_blank(acknowledgement.note)) return Status::usage("what was found? The note is empty");
  RunFolder folder;
  if (Status s = folder.open(run_dir); !s.ok()) return s;
  RunState state;
  if (Status s = read_state(run_dir, &state); !s.ok()) return s;
  if (!state.has_hold()) return Status::usage("there is nothing to acknowledge in " + run_dir);

  // On record first: a run must not go on without it.
  if (Status s = drop_half_line(folder.events_path()); !s.ok()) return s;
  EventLog events;
  if (Status s = events.open(folder.events_path()); !s.ok()) return s;
  if (Status s = events.append("acknowledged", event_of(state, acknowledgement)); !s.ok()) return s;
  *what = fmt::format("exit code {} at attempt {} of epoch {}: {}", state.hold().exit_code(),
                      state.hold().attempt(), state.hold().epoch(), printable(state.hold().reason()));
  release_hold(&state);
  return write_state(run_dir, state);
}

}  // namespace holdfast
