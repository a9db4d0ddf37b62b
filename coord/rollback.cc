#include "holdfast/coord/rollback.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>

#include "holdfast/coord/policy.pb.h"
#include "holdfast/coord/rate_rules.h"
#include "holdfast/coord/state.pb.h"

namespace holdfast {
namespace {

std::uint64_t cause_of(const Incident& incident) {
  const SkipRecord seen = skip_record(incident);
  const std::string text =
      fmt::format("{}|{}|{}", static_cast<int>(incident.verdict.kind),
                  seen.stage ? stage_name(*seen.stage) : std::string_view(), seen.tensor);
  return XXH3_64bits(text.data(), text.size());
}

// How often in a row it has failed so, this time included.
std::uint64_t count_failure(const Incident& incident, std::uint64_t restored_at, RunState* state) {
  RunState::RepeatedFailure& failure = *state->mutable_repeated_failure();
  const std::uint64_t offset = incident.attempt - std::min(restored_at, incident.attempt);
  const std::uint64_t cause = cause_of(incident);
  const bool same = failure.times() > 0 && failure.cause() == cause &&
                    (failure.attempt() == incident.attempt || failure.offset() == offset);
  if (!same) failure.Clear();
  failure.set_attempt(incident.attempt);
  failure.set_offset(offset);
  failure.set_cause(cause);
  failure.set_times(failure.times() + 1);
  return failure.times();
}

RollbackChoice end_run(StatusCode code, std::string why) {
  return {std::nullopt, code, std::move(why), false};
}

}  // namespace

std::optional<GenerationId> newest_before(std::span<const GenerationId> generations, std::uint64_t before) {
  std::optional<GenerationId> newest;
  for (const GenerationId& id : generations) {
    if (id.attempt < before && (!newest || id > *newest)) newest = id;
  }
  return newest;
}

RollbackChoice choose_rollback(const Policy& policy, const Incident& incident, std::uint64_t restored_at,
                               std::span<const GenerationId> generations, RunState* state) {
  if (state->rollbacks() >= policy.max_rollbacks()) {
    return end_run(StatusCode::kBudgetExhausted, fmt::format("rollback budget spent ({} of {})",
                                                             state->rollbacks(), policy.max_rollbacks()));
  }
  const std::uint64_t times = count_failure(incident, restored_at, state);
  RunState::RepeatedFailure& failure = *state->mutable_repeated_failure();
  const std::uint64_t most = policy.max_identical_failures();
  if (times >= 2 * most) {
    RollbackChoice stop =
        end_run(StatusCode::kBudgetExhausted,
                fmt::format("the same failure {} times in a row, after two generations", times));
    stop.do_not_requeue = true;
    return stop;
  }
  if (times == most) failure.set_before(state->restored_attempt());
  const auto to = newest_before(generations, failure.has_before() ? failure.before() : ~std::uint64_t{0});
  if (!to) {
    RollbackChoice none = end_run(
        StatusCode::kNoCleanGeneration,
        times < most
            ? "there is no checkpoint to go back to"
            : fmt::format("the same failure {} times in a row, and there is no earlier checkpoint", times));
    none.do_not_requeue = times >= most;
    return none;
  }
  state->set_rollbacks(state->rollbacks() + 1);
  return {to, StatusCode::kOk, {}, false};
}

}  // namespace holdfast
