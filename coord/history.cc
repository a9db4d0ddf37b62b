#include "holdfast/coord/history.h"

#include <fmt/format.h>
#include <xxhash.h>

#include "holdfast/coord/event_log.h"
#include "holdfast/coord/policy.pb.h"
#include "holdfast/coord/printable.h"
#include "holdfast/coord/rate_rules.h"
#include "holdfast/coord/state.pb.h"

namespace holdfast {
namespace {

constexpr int kMostEndings = 256;
constexpr std::size_t kMostReasonBytes = 1024;

Ending* new_ending(RunState* state) {
  if (state->endings_size() >= kMostEndings) state->mutable_endings()->DeleteSubrange(0, 1);
  Ending* ending = state->add_endings();
  ending->set_epoch(state->epoch());
  ending->set_attempt(state->attempt());
  ending->set_attempts_made(state->attempt() - state->first_attempt());
  ending->set_time(utc_time());
  return ending;
}

// Not of the reason: it holds values, hosts and indices, which differ between two failures that are the same.
std::uint64_t cause_of(const Ending& ending) {
  const std::string text = fmt::format("{}|{}|{}", ending.exit_code(), ending.stage(), ending.tensor());
  return XXH3_64bits(text.data(), text.size());
}

// As long after its start, or at the same attempt: after falling back it takes longer to get to the same
// data.
bool same_failure(const Ending& one, const Ending& other) {
  return one.has_cause() && one.cause() == other.cause() &&
         (one.attempts_made() == other.attempts_made() || one.attempt() == other.attempt());
}

std::uint64_t identical_failures(const RunState& state) {
  const auto& endings = state.endings();
  const Ending& last = endings.at(endings.size() - 1);
  std::uint64_t count = 0;
  for (int i = endings.size() - 1; i >= 0; --i) {
    const Ending& ending = endings.at(i);
    if (ending.forgiven() || !same_failure(ending, last)) break;
    ++count;
  }
  return count;
}

}  // namespace

bool needs_acknowledgement(StatusCode code) {
  return code == StatusCode::kBudgetExhausted || code == StatusCode::kLossScaleExhausted ||
         code == StatusCode::kRanksDisagree || code == StatusCode::kNoCleanGeneration;
}

std::uint64_t add_ending(const Policy& policy, StatusCode code, const std::string& reason,
                         const Incident* incident, bool older_checkpoint, RunState* state) {
  Ending* ending = new_ending(state);
  state->set_running(false);
  ending->set_exit_code(static_cast<int>(code));
  if (code == StatusCode::kOk || code == StatusCode::kStoppedByOperator) return 0;
  ending->set_reason(reason.substr(0, kMostReasonBytes));
  if (incident != nullptr) {
    const SkipRecord seen = skip_record(*incident);
    if (seen.stage) ending->set_stage(std::string(stage_name(*seen.stage)));
    ending->set_tensor(seen.tensor);
    ending->set_rank(seen.rank);
    ending->set_host(seen.host);
  }
  ending->set_cause(cause_of(*ending));
  const std::uint64_t identical = identical_failures(*state);
  if (identical == 1) state->clear_fell_back();
  const std::uint64_t most = policy.max_identical_failures();
  bool too_many = identical >= (state->fell_back() ? 2 * most : most);
  if (too_many && older_checkpoint && !state->fell_back()) {
    state->set_fell_back(true);
    state->set_restore_before(state->first_attempt());
    too_many = false;
  }
  if (!too_many && !needs_acknowledgement(code)) return identical;
  Hold* hold = state->mutable_hold();
  hold->set_epoch(ending->epoch());
  hold->set_attempt(ending->attempt());
  hold->set_exit_code(ending->exit_code());
  hold->set_reason(ending->reason());
  if (too_many) hold->set_identical_failures(identical);
  return identical;
}

void add_unknown_ending(RunState* state) {
  new_ending(state);
  state->set_running(false);
}

std::string describe_hold(const Policy& policy, const std::string& run_dir, const Hold& hold) {
  std::string text;
  if (hold.has_identical_failures()) {
    text = fmt::format("do not requeue: the run in {} failed {} times in a row at the same place", run_dir,
                       hold.identical_failures());
  } else {
    text = fmt::format("the run in {} was aborted, and nobody has acknowledged it", run_dir);
  }
  text +=
      fmt::format("; exit code {} at attempt {} of epoch {}: {}. Find the cause, then: ", hold.exit_code(),
                  hold.attempt(), hold.epoch(), printable(hold.reason()));
  text += "holdfast ack " + run_dir + " --owner WHO --note TEXT";
  const std::string& authority = policy.authorities().resume();
  if (!authority.empty()) text += " (who may order it: " + printable(authority) + ")";
  return text;
}

void release_hold(RunState* state) {
  const bool row_ends = state->hold().has_identical_failures();
  state->clear_hold();
  if (row_ends && state->endings_size() > 0) {
    state->mutable_endings(state->endings_size() - 1)->set_forgiven(true);
  }
}

}  // namespace holdfast
