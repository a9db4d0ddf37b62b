// Rank 0's part in checkpoints: what they keep of its memory, and going back to them.
#include <cstdio>
#include <utility>

#include "holdfast/coord/coordinator.h"
#include "holdfast/coord/evidence/evidence.pb.h"
#include "holdfast/coord/evidence/evidence_store.h"
#include "holdfast/coord/policy.pb.h"
#include "holdfast/coord/printable.h"
#include "holdfast/coord/rollback.h"
#include "holdfast/coord/state.pb.h"
#include "incident_json.h"

namespace holdfast {
namespace {

using Json = nlohmann::ordered_json;

// What the run has been through is not undone by going back: whatever is not named here is.
void keep_history(const RunState& from, RunState* to) {
  to->set_epoch(from.epoch());
  to->set_holder(from.holder());
  to->set_running(from.running());
  to->set_run_id(from.run_id());
  to->set_claimed_epoch(from.claimed_epoch());
  to->set_incidents(from.incidents());
  to->set_rollbacks(from.rollbacks());
  to->set_fell_back(from.fell_back());
  to->clear_repeated_failure();
  to->clear_generation();
  to->clear_hold();
  if (from.has_repeated_failure()) *to->mutable_repeated_failure() = from.repeated_failure();
  if (from.has_generation()) *to->mutable_generation() = from.generation();
  if (from.has_hold()) *to->mutable_hold() = from.hold();
  *to->mutable_endings() = from.endings();
}

}  // namespace

void Coordinator::set_generations(std::vector<GenerationId> generations) {
  checkpoints_on_ = true;
  generations_ = std::move(generations);
  std::erase_if(manifests_, [this](const auto& known) {
    return std::ranges::find(generations_, known.first) == generations_.end();
  });
}

std::string Coordinator::lineage() {
  save_parts();
  RunState lineage = *memory_;
  lineage.clear_endings();
  lineage.clear_hold();
  return lineage.SerializeAsString();
}

std::optional<GenerationId> Coordinator::restore_at_most() const {
  if (rollback_) return rollback_->to;
  return memory_->has_restore_before() ? newest_before(generations_, memory_->restore_before())
                                       : std::nullopt;
}

bool Coordinator::may_begin_anew() const { return generations_.empty() && !memory_->has_generation(); }

Decision Coordinator::go_back_or_end(const Decision& wanted, const Incident& incident) {
  RollbackChoice choice =
      choose_rollback(*policy_, incident, memory_->first_attempt(), generations_, memory_.get());
  if (!choice.to) {
    do_not_requeue_ = choice.do_not_requeue;
    return {Action::kAbort, choice.code, choice.why + ": " + wanted.reason};
  }
  rollback_ = Rollback{*choice.to, incident.attempt, incident.closing};
  Decision decision{Action::kRollBack, StatusCode::kOk,
                    "back to " + choice.to->name() + ": " + wanted.reason};
  decision.back_to = choice.to;
  return decision;
}

Status Coordinator::restored(const RestoredState& at) {
  if (look_for_takeover()) {
    return {StatusCode::kRanksDisagree, "another run has taken over " + folder_.path()};
  }
  RunState lineage;
  if (!lineage.ParseFromString(at.lineage)) {
    return {StatusCode::kNoCleanGeneration,
            at.from.name() + " holds a memory of the run that cannot be read"};
  }
  keep_history(*memory_, &lineage);
  *memory_ = std::move(lineage);
  memory_->set_attempt(at.from.attempt);
  memory_->set_restored_attempt(at.from.attempt);
  memory_->set_update(at.update);
  memory_->set_skips(at.skips);
  memory_->clear_restore_before();
  manifests_[at.from] = at.manifest_sha256;
  for (const std::string& why : at.refused) std::fprintf(stderr, "holdfast: %s\n", printable(why).c_str());
  Json fields = {{"generation", at.from.name()}, {"generation_ranks", at.ranks}, {"refused", at.refused}};
  go_on_from_memory(std::exchange(rollback_, std::nullopt), std::move(fields));
  return Status();
}

void Coordinator::begun_anew() {
  RunState fresh;
  keep_history(*memory_, &fresh);
  if (resumed_) {
    *memory_ = std::move(fresh);
    go_on_from_memory(std::nullopt, {{"generation", nullptr}});
  }
}

void Coordinator::go_on_from_memory(const std::optional<Rollback>& rollback, Json what) {
  if (rollback) memory_->set_epoch(memory_->epoch() + 1);
  const std::uint64_t from = memory_->attempt();
  const bool skips_data = rollback && policy_->rollback_skips_data();
  // After the last attempt there is none to drop.
  const std::uint64_t end = skips_data ? rollback->attempt + (rollback->closing ? 0 : 1) : from;
  memory_->set_attempt(end);
  memory_->set_skips(memory_->skips() + (end - from));
  memory_->set_first_attempt(memory_->attempt());
  restore_parts();
  if (dropped_) dropped_->restore(*memory_);
  write_memory();
  Json fields = place_json(memory_->epoch(), memory_->attempt(), memory_->update());
  if (rollback) {
    fields["from_attempt"] = rollback->attempt;
    fields["rollbacks"] = memory_->rollbacks();
    fields["rollbacks_left"] = policy_->max_rollbacks() - memory_->rollbacks();
  }
  for (auto& [name, value] : what.items()) fields[name] = value;
  record(rollback ? "rolled_back" : "restored", std::move(fields));
  // What was dropped there or later is not dropped any more: those attempts are made again.
  if (dropped_ && !look_for_takeover()) {
    static_cast<void>(ledger_.append("went_back", {{"epoch", memory_->epoch()}, {"attempt", from}}));
  }
  for (std::uint64_t attempt = from; attempt < end; ++attempt) {
    drop_samples(memory_->epoch(), attempt, memory_->update(), -1);
  }
  update_metrics();
}

void Coordinator::restore_failed(const Status& why) {
  run_ended(memory_->epoch(), memory_->attempt(), memory_->update(),
            {Action::kAbort, why.code(), why.message()});
}

void Coordinator::checkpoint_done(const CheckpointNews& news) {
  Json fields = {{"epoch", news.id.epoch}, {"attempt", news.id.attempt}, {"generation", news.id.name()}};
  if (news.published) {
    memory_->mutable_generation()->set_epoch(news.id.epoch);
    memory_->mutable_generation()->set_attempt(news.id.attempt);
    metrics_.set_last_known_good(news.id.attempt);
    manifests_[news.id] = news.manifest_sha256;
    fields["manifest_sha256"] = news.manifest_sha256;
    fields["bytes"] = news.bytes;
    fields["seconds"] = json_number(news.seconds);
    fields["removed"] = news.removed;
    if (!news.reason.empty()) fields["trouble"] = news.reason;
    record("checkpoint_published", std::move(fields));
    return;
  }
  metrics_.count_failed_checkpoint(news.non_finite);
  fields["reason"] = news.reason;
  record(news.non_finite ? "checkpoint_refused" : "checkpoint_failed", std::move(fields));
  std::fprintf(stderr, "holdfast: no checkpoint %s: %s; training goes on\n", news.id.name().c_str(),
               printable(news.reason).c_str());
}

}  // namespace holdfast
