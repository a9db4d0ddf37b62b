// What rank 0 remembers of a run: taken up at a restart, written as it goes.
#include <algorithm>
#include <cstdio>
#include <exception>

#include "holdfast/coord/coordinator.h"
#include "holdfast/coord/evidence/evidence.pb.h"
#include "holdfast/coord/evidence/evidence_store.h"
#include "holdfast/coord/history.h"
#include "holdfast/coord/policy.pb.h"
#include "holdfast/coord/printable.h"
#include "holdfast/coord/state.h"
#include "holdfast/coord/state.pb.h"

namespace holdfast {
namespace {

using SkipMessages = google::protobuf::RepeatedPtrField<SkipMessage>;

void save_skips(const std::deque<SkipRecord>& skips, SkipMessages* messages) {
  messages->Clear();
  for (const SkipRecord& skip : skips) {
    SkipMessage* message = messages->Add();
    message->set_attempt(skip.attempt);
    if (skip.stage) message->set_stage(static_cast<int>(*skip.stage));
    message->set_rank(skip.rank);
    message->set_host(skip.host);
    message->set_tensor(skip.tensor);
  }
}

std::deque<SkipRecord> restored_skips(const SkipMessages& messages) {
  std::deque<SkipRecord> skips;
  for (const SkipMessage& message : messages) {
    SkipRecord skip{message.attempt(), {}, message.rank(), message.host(), message.tensor()};
    if (message.has_stage()) skip.stage = static_cast<Stage>(message.stage());
    skips.push_back(std::move(skip));
  }
  return skips;
}

}  // namespace

Status Coordinator::resume(const Policy& policy, const std::string& run_dir,
                           std::unique_ptr<Coordinator>* out) {
  if (run_dir.empty() || !RunFolder::holds_record(run_dir)) return create(policy, run_dir, out);
  std::unique_ptr<Coordinator> made(new Coordinator(policy));
  if (Status s = made->take_up(run_dir); !s.ok()) return s;
  *out = std::move(made);
  return Status();
}

Status Coordinator::take_up(const std::string& run_dir) {
  if (Status s = folder_.open(run_dir); !s.ok()) return s;
  if (Status s = read_state(run_dir, memory_.get()); !s.ok()) return s;
  if (memory_->has_hold()) {
    return {StatusCode::kRestartNotAcknowledged, describe_hold(*policy_, run_dir, memory_->hold())};
  }
  if (Status s = drop_half_line(folder_.events_path()); !s.ok()) return s;
  if (Status s = events_.open(folder_.events_path()); !s.ok()) return s;
  if (memory_->running()) add_unknown_ending(memory_.get());
  memory_->set_epoch(memory_->epoch() + 1);
  memory_->set_claimed_epoch(memory_->epoch());
  memory_->set_holder(folder_.holder());
  memory_->set_running(true);
  restore_parts();
  resumed_ = true;
  keeps_record_ = true;
  return Status();
}

void Coordinator::restore_parts() {
  const RunState& from = *memory_;
  budget_.restore(from.total_skips(), from.consecutive_skips());
  const std::vector<std::string> raised(from.raised_alerts().begin(), from.raised_alerts().end());
  rules_.restore(from.attempts_made(), restored_skips(from.recent_skips()),
                 restored_skips(from.pending_skips()), raised);
  calibration_alert_ = std::ranges::find(raised, kCalibrationRule) != raised.end();
  calibration_.restore({from.calibration_pending_overflows(),
                        from.calibration_pending_defects(),
                        from.calibration_total(),
                        {from.calibration_attempts().begin(), from.calibration_attempts().end()}});
  std::map<std::string, std::uint64_t> devices;
  for (const RunState::Device& device : from.devices()) devices[device.name()] = device.incidents();
  suspects_.restore(std::move(devices), from.single_origin_incidents());
}

void Coordinator::save_parts() {
  RunState& to = *memory_;
  to.set_total_skips(budget_.total());
  to.set_consecutive_skips(budget_.consecutive());
  to.set_attempts_made(rules_.attempts());
  save_skips(rules_.skips(), to.mutable_recent_skips());
  save_skips(rules_.pending(), to.mutable_pending_skips());
  to.clear_raised_alerts();
  for (const std::string& name : rules_.raised()) to.add_raised_alerts(name);
  if (calibration_alert_) to.add_raised_alerts(std::string(kCalibrationRule));
  const Calibration::State calibration = calibration_.state();
  to.set_calibration_pending_overflows(calibration.overflows);
  to.set_calibration_pending_defects(calibration.defects);
  to.set_calibration_total(calibration.total);
  to.mutable_calibration_attempts()->Assign(calibration.attempts.begin(), calibration.attempts.end());
  to.clear_devices();
  for (const auto& [name, incidents] : suspects_.incidents()) {
    RunState::Device* device = to.add_devices();
    device->set_name(name);
    device->set_incidents(incidents);
  }
  to.set_single_origin_incidents(suspects_.single_origin());
  if (dropped_) dropped_->save(&to);
}

void Coordinator::keep_ledger(SampleSource source) {
  if (!keeps_record_) return;
  dropped_.emplace(std::move(source), static_cast<int>(topology_.placements().size()));
  dropped_->restore(*memory_);
  if (resumed_) static_cast<void>(drop_half_line(folder_.ledger_path()));  // append() says what is wrong
  static_cast<void>(ledger_.open(folder_.ledger_path()));
}

void Coordinator::drop_samples(std::uint64_t epoch, std::uint64_t attempt, std::uint64_t update, int origin) {
  using Json = nlohmann::ordered_json;
  if (!dropped_) return;
  Json where = {{"epoch", epoch}, {"attempt", attempt}, {"update", update}};
  try {
    Json line = dropped_->count(epoch, attempt, origin);
    if (!look_for_takeover()) static_cast<void>(ledger_.append("dropped", line));
  } catch (const std::exception& error) {  // the trainer's own code; evidence never decides
    where["reason"] = error.what();
    record("samples_unknown", std::move(where));
    return;
  } catch (...) {
    where["reason"] = "exception of unknown type";
    record("samples_unknown", std::move(where));
    return;
  }
  while (const std::optional<DroppedDataSkew> skew = dropped_->next_skew()) {
    Json fields = where;
    fields["of"] = skew->of;
    fields["statistic"] = "chi_square";
    fields["value"] = skew->fit.statistic;
    fields["degrees_of_freedom"] = skew->fit.degrees;
    fields["p"] = skew->fit.p;
    fields["most_over"] = {{"index", skew->fit.most_over},
                           {"dropped", skew->most_over_observed},
                           {"expected", skew->fit.most_over_expected}};
    record("dropped_data_skewed", std::move(fields));
  }
}

void Coordinator::keep_loss_scale(double scale, std::uint64_t clean_updates,
                                  std::uint64_t overflows_to_halve) {
  RunState::LossScale* to = memory_->mutable_loss_scale();
  to->set_scale(scale);
  to->set_clean_updates(clean_updates);
  to->set_overflows_to_halve(overflows_to_halve);
  metrics_.set_loss_scale(scale, policy_->loss_scale().smallest());
}

// A lock does not bind a rank 0 that was cut off with its host, or stopped, while an operator gave the folder
// to another: it would wake up and write over what the other remembers. The other's epoch is in the state, so
// that is looked at before anything is written. What cannot be read is not another's: the next write replaces
// it.
bool Coordinator::look_for_takeover() {
  if (taken_over_ || !keeps_record_) return taken_over_;
  const std::string by =
      monitor_.taken_over() ? monitor_.taken_over_by() : taken_over_by(folder_.path(), *memory_);
  taken_over_ = !by.empty();
  if (taken_over_) {
    std::fprintf(stderr, "holdfast: the run folder %s now belongs to %s: this run leaves it alone\n",
                 folder_.path().c_str(), by.c_str());
  }
  return taken_over_;
}

std::function<Status()> Coordinator::still_holds() const {
  RunState mine;
  mine.set_epoch(memory_->epoch());
  mine.set_claimed_epoch(memory_->claimed_epoch());
  mine.set_holder(memory_->holder());
  return [mine, run_dir = folder_.path()]() -> Status {
    const std::string by = taken_over_by(run_dir, mine);
    if (by.empty()) return Status();
    return {StatusCode::kRanksDisagree, "another run has taken over " + run_dir + " (" + by + ")"};
  };
}

void Coordinator::write_memory(bool first) {
  clean_attempts_ = 0;
  if (!keeps_record_ || taken_over_) return;
  save_parts();
  const Status status = first ? claim_state(folder_.path(), *memory_) : write_state(folder_.path(), *memory_);
  if (!status.ok() && !look_for_takeover()) report_unwritten(status);
}

// Evidence never decides: training goes on, and a restart would find an older memory.
void Coordinator::report_unwritten(const Status& status) {
  record("state_not_written", {{"epoch", memory_->epoch()},
                               {"attempt", memory_->attempt()},
                               {"update", memory_->update()},
                               {"reason", status.message()}});
  if (write_failed_) return;
  write_failed_ = true;
  std::fprintf(stderr, "holdfast: %s; training goes on, and a restart would find an older state\n",
               status.message().c_str());
}

}  // namespace holdfast
