#include "holdfast/coord/coordinator.h"

#include <fmt/format.h>

#include <algorithm>
#include <random>

#include "holdfast/coord/policy.pb.h"
#include "holdfast/coord/decide.h"
#include "holdfast/coord/evidence/evidence.pb.h"
#include "holdfast/coord/evidence/evidence_store.h"
#include "holdfast/coord/history.h"
#include "holdfast/coord/policy.h"
#include "holdfast/coord/rollback.h"
#include "holdfast/coord/state.pb.h"
#include "incident_json.h"
#include "layer_log.h"

namespace holdfast {
namespace {

using Json = nlohmann::ordered_json;

Json most_json(const MostFrequent& most) { return {{"value", most.value}, {"skips", most.skips}}; }

Json profile_json(const SkipProfile& profile) {
  return {{"skips", profile.skips},
          {"stage", most_json(profile.stage)},
          {"rank", most_json(profile.rank)},
          {"host", most_json(profile.host)},
          {"tensor", most_json(profile.tensor)}};
}

std::string new_run_id() {
  std::random_device random;
  std::string id;
  for (int i = 0; i < 4; ++i) id += fmt::format("{:08x}", random());
  return id;
}

}  // namespace

Coordinator::Coordinator(const Policy& policy)
    : policy_(std::make_unique<const Policy>(policy)),
      memory_(std::make_unique<RunState>()),
      rules_(policy),
      suspects_(policy.suspect_after_incidents()),
      metrics_(rules_.names(), policy.max_total_skips(), policy.max_consecutive_skips()),
      monitor_(metrics_) {
  memory_->set_epoch(1);
  memory_->set_claimed_epoch(1);
  memory_->set_running(true);
  memory_->set_run_id(new_run_id());
}
Coordinator::~Coordinator() = default;

Status Coordinator::create(const Policy& policy, const std::string& run_dir,
                           std::unique_ptr<Coordinator>* out) {
  std::unique_ptr<Coordinator> made(new Coordinator(policy));
  if (!run_dir.empty()) {
    if (Status s = made->folder_.create(run_dir); !s.ok()) return s;
    if (Status s = made->events_.open(made->folder_.events_path()); !s.ok()) return s;
    made->memory_->set_holder(made->folder_.holder());
    made->keeps_record_ = true;
  }
  *out = std::move(made);
  return Status();
}

void Coordinator::record(const std::string& name, Json fields) {
  if (!policy_->owner().empty()) fields["owner"] = policy_->owner();
  if (!policy_->ticket().empty()) fields["ticket"] = policy_->ticket();
  // A failure is reported and counted by the log; evidence never decides.
  if (keeps_record_ && !look_for_takeover()) static_cast<void>(events_.append(name, fields));
}

Status Coordinator::serve_metrics(const std::string& address, int port) {
  return MetricsEndpoint::create(address, port, metrics_, &endpoint_);
}

// O(number of rules), allocates nothing.
void Coordinator::update_metrics() {
  metrics_.set_position(memory_->epoch(), memory_->attempt(), memory_->update(), memory_->skips());
  metrics_.set_skips_charged(budget_.total(), budget_.consecutive());
  for (std::size_t rule = 0; rule < rules_.size(); ++rule) {
    const RateRules::Window window = rules_.window(rule);
    metrics_.set_window(rule, window.skips, window.attempts, window.raised);
  }
  metrics_.set_calibration_alert(calibration_alert_);
}

bool Coordinator::stop_requested() {
  if (!monitor_.stop_requested()) return false;
  if (stop_told_) return true;
  stop_told_ = true;
  Json fields = place_json(memory_->epoch(), memory_->attempt(), memory_->update());
  fields["by"] = monitor_.stop_requested_by();
  record("stop_requested", std::move(fields));
  return true;
}

void Coordinator::finish_metrics(StatusCode code) {
  update_metrics();
  metrics_.set_running(false);
  monitor_.finish(static_cast<int>(code));
}

void Coordinator::run_started(std::uint64_t epoch, Topology topology) {
  topology_ = std::move(topology);
  memory_->set_first_attempt(memory_->attempt());
  // Before the first event: from here on whoever held the folder before is told by the epoch that it does no
  // more.
  write_memory(true);
  Json fields = place_json(epoch, memory_->attempt(), memory_->update());
  if (resumed_ && memory_->endings_size() > 0) {
    const Ending& last = memory_->endings(memory_->endings_size() - 1);
    fields["resumed_from"] = {{"epoch", last.epoch()},
                              {"exit_code", last.has_exit_code() ? Json(last.exit_code()) : Json(nullptr)}};
  }
  fields["ranks"] = topology_.placements().size();
  fields["topology"] = topology_.map();
  fields["policy"] = policy_text(*policy_);
  record("run_started", std::move(fields));
  update_metrics();
  if (keeps_record_) monitor_.start(folder_.path(), *memory_, topology_);
}

void Coordinator::run_finished(std::uint64_t epoch, std::uint64_t attempts, std::uint64_t updates) {
  charge_streak(epoch, attempts, updates);  // no update came to show that it was calibration
  record_rate_changes(epoch, attempts, updates);
  Json fields = place_json(epoch, attempts, updates);
  fields["skips"] = budget_.total();
  fields["calibration_skips"] = calibration_.total();
  record("run_finished", std::move(fields));
  memory_->set_attempt(attempts);
  memory_->set_update(updates);
  add_ending(*policy_, StatusCode::kOk, "", nullptr, false, memory_.get());
  write_memory();
  finish_metrics(StatusCode::kOk);
}

// Also says so when the run fails in the same way again and again.
void Coordinator::end_epoch(Decision* decision, const Incident* incident) {
  const bool older = newest_before(generations_, memory_->restored_attempt()).has_value();
  const std::uint64_t identical =
      add_ending(*policy_, decision->code, decision->reason, incident, older, memory_.get());
  if (do_not_requeue_) memory_->mutable_hold()->set_identical_failures(std::max<std::uint64_t>(identical, 1));
  const bool for_good = memory_->hold().has_identical_failures();
  if (identical >= policy_->max_identical_failures()) {
    decision->reason += "; the same failure " + std::to_string(identical) + " times in a row";
    if (!for_good && memory_->has_restore_before()) {
      decision->reason += ": the next start goes back one checkpoint further";
    }
  }
  if (for_good) decision->reason += ": do not requeue this job";
}

std::vector<std::string> Coordinator::origin_devices(const Incident& incident) const {
  std::vector<std::string> devices;
  for (const Origin& origin : incident.origins()) {
    // The same sum, and the same update, is on every rank: whose share it was found in says nothing of a
    // device.
    if (origin.finding.stage == Stage::kReduction || origin.finding.stage == Stage::kOptimizer) continue;
    if (const RankPlacement* place = topology_.find(origin.rank)) devices.push_back(place->device());
  }
  return devices;
}

void Coordinator::run_broken(std::uint64_t epoch, std::uint64_t attempt, std::uint64_t update,
                             const Decision& decision) {
  run_ended(epoch, attempt, update, decision);
}

void Coordinator::run_ended(std::uint64_t epoch, std::uint64_t attempt, std::uint64_t update,
                            const Decision& decision) {
  Json fields = place_json(epoch, attempt, update);
  fields["reason"] = decision.reason;
  fields["exit_code"] = decision.exit_code();
  fields["code"] = status_code_name(decision.code);
  fields["agreed"] = decision.agreed;
  record("aborted", std::move(fields));
  if (!memory_->running()) return;  // what ended it is on record already
  memory_->set_attempt(attempt);
  memory_->set_update(update);
  Decision ending = decision;
  end_epoch(&ending, nullptr);
  write_memory();
  finish_metrics(decision.code);
}

void Coordinator::update_applied(std::uint64_t epoch, std::uint64_t attempt, std::uint64_t update) {
  rules_.count_attempt();
  memory_->set_attempt(attempt + 1);
  memory_->set_update(update + 1);
  // A killed run must not come back in the middle of a row of skips that has ended.
  bool changed = budget_.consecutive() != 0 || calibration_.pending() != 0;
  settle_by_update(epoch, attempt, update);
  budget_.count_update();
  // Only an overflow can raise the alert; time alone clears it.
  if (calibration_alert_) {
    watch_calibration_rate(epoch, attempt, update);
    changed |= !calibration_alert_;
  }
  changed |= record_rate_changes(epoch, attempt, update);
  if (++clean_attempts_ >= policy_->state_interval_attempts() || changed) write_memory();
  metrics_.count_update();
  update_metrics();
}

void Coordinator::settle_by_update(std::uint64_t epoch, std::uint64_t attempt, std::uint64_t update) {
  if (calibration_.pending() == 0) return;
  const Calibration::Settled settled = calibration_.settle_by_update();
  rules_.settle_pending(false);
  metrics_.count_calibration_skips(settled.calibration);
  if (settled.calibration > 0) {
    Json fields = place_json(epoch, attempt, update);
    fields["skips"] = settled.calibration;
    fields["total"] = calibration_.total();
    record("calibrated", std::move(fields));
  }
  charge(settled.charged, epoch, attempt, update);
}

void Coordinator::charge_streak(std::uint64_t epoch, std::uint64_t attempt, std::uint64_t update) {
  rules_.settle_pending(true);
  charge(calibration_.settle_as_charged(), epoch, attempt, update);
}

void Coordinator::charge(std::uint64_t skips, std::uint64_t epoch, std::uint64_t attempt,
                         std::uint64_t update) {
  if (skips == 0) return;
  budget_.charge(skips);
  Json fields = place_json(epoch, attempt, update);
  fields["skips"] = skips;
  fields["total"] = budget_.total();
  record("calibration_charged", std::move(fields));
}

void Coordinator::watch_calibration_rate(std::uint64_t epoch, std::uint64_t attempt, std::uint64_t update) {
  const auto& rule = policy_->loss_scale();
  const std::uint64_t skips = calibration_.in_window(attempt, rule.window_attempts());
  const bool above = skips > rule.max_calibration_skips();
  if (above == calibration_alert_) return;
  calibration_alert_ = above;
  if (above) metrics_.count_alert(kCalibrationRule);
  Json fields = place_json(epoch, attempt, update);
  fields["rule"] = kCalibrationRule;
  fields["skips"] = skips;
  fields["window_attempts"] = rule.window_attempts();
  fields["limit"] = rule.max_calibration_skips();
  record(above ? "alert_raised" : "alert_cleared", std::move(fields));
}

// Whether there were any.
bool Coordinator::record_rate_changes(std::uint64_t epoch, std::uint64_t attempt, std::uint64_t update) {
  bool any = false;
  while (const std::optional<RateChange> change = rules_.next_change()) {
    any = true;
    if (change->raised) metrics_.count_alert(change->rule);
    Json fields = place_json(epoch, attempt, update);
    fields["rule"] = change->rule;
    fields["skips"] = change->skips;
    fields["attempts"] = change->attempts;
    fields["fraction"] = change->fraction();
    fields["window_attempts"] = change->window_attempts;
    fields["limit"] = change->max_skips;
    fields["in_window"] = profile_json(change->in_window);
    fields["before"] = profile_json(change->before);
    fields["changed"] = change->changed();
    put_authorities(*policy_, &fields);
    record(change->raised ? "alert_raised" : "alert_cleared", std::move(fields));
  }
  return any;
}

void Coordinator::scale_changed(std::uint64_t epoch, std::uint64_t attempt, std::uint64_t update, double from,
                                double to) {
  Json fields = place_json(epoch, attempt, update);
  fields["from"] = from;
  fields["to"] = to;
  record("scale_changed", std::move(fields));
}

void Coordinator::spike(std::uint64_t epoch, std::uint64_t attempt, std::uint64_t update,
                        std::string_view name, double value, double threshold) {
  Json fields = place_json(epoch, attempt, update);
  fields["name"] = name;
  fields["value"] = json_number(value);
  fields["threshold"] = json_number(threshold);
  record("spike", std::move(fields));
}

void Coordinator::headroom(std::uint64_t epoch, std::uint64_t attempt, std::uint64_t update,
                           std::string_view tensor, double abs_max, double largest) {
  Json fields = place_json(epoch, attempt, update);
  fields["tensor"] = tensor;
  fields["abs_max"] = json_number(abs_max);
  fields["largest"] = json_number(largest);
  record("headroom_low", std::move(fields));
}

Decision Coordinator::decide_and_count(const Incident& incident) {
  // An attempt that is stopped is made again by whoever resumes the run: it leaves no trace.
  const bool stop = incident.verdict.kind == Verdict::Kind::kRequested &&
                    incident.verdict.sum.requests(Request::kStop) != 0;
  if (stop) return decide(*policy_, budget_, incident);
  rules_.count_attempt();
  const bool pending = is_pending(incident);
  if (!pending) charge_streak(incident.epoch, incident.attempt, incident.update);
  Decision decision = decide(*policy_, budget_, incident, calibration_.pending_defects(), checkpoints_on_);
  const bool calibration = is_calibration(*policy_, incident);
  if (decision.action == Action::kSkip && !calibration) {
    if (const auto broken = rules_.broken_by_a_skip()) {
      decision = {Action::kAbort, StatusCode::kBudgetExhausted, broken->why + ": " + incident.describe()};
      if (broken->rolls_back) decision.action = Action::kRollBack;
    }
  }
  if (decision.action == Action::kRollBack) {
    decision = go_back_or_end(decision, incident);
  } else if (decision.action != Action::kSkip) {
    charge_streak(incident.epoch, incident.attempt, incident.update);
  } else if (calibration) {
    calibration_.count_overflow(incident.attempt);
    rules_.count_pending(skip_record(incident));
  } else {
    // A pending defect will be charged whatever ends the streak, so the rates need not wait for it.
    if (pending) {
      calibration_.count_defect();
    } else {
      budget_.count_skip();
    }
    rules_.count_skip(skip_record(incident));
  }
  watch_calibration_rate(incident.epoch, incident.attempt, incident.update);
  return decision;
}

Decision Coordinator::handle(const Incident& incident) {
  if (look_for_takeover()) {
    return {Action::kAbort, StatusCode::kRanksDisagree,
            "another run has taken over " + folder_.path() + "; this one was cut off and leaves it alone"};
  }
  Decision decision = decide_and_count(incident);
  if (!is_calibration(*policy_, incident)) suspects_.count(origin_devices(incident));
  memory_->set_incidents(memory_->incidents() + 1);
  // An attempt that ends the run was neither applied nor skipped: a restart makes it again.
  const bool skipped = decision.action == Action::kSkip;
  memory_->set_attempt(incident.attempt + (skipped ? 1 : 0));
  memory_->set_update(incident.update);
  if (skipped) memory_->set_skips(memory_->skips() + 1);
  if (skipped && incident.loss_scale && incident.loss_scale->after_skip) {
    const LossScaleView::State& after = *incident.loss_scale->after_skip;
    keep_loss_scale(after.scale, after.clean_updates, after.overflows_to_halve);
  }
  if (decision.ends_run()) end_epoch(&decision, &incident);
  decision.evidence = order_evidence(incident, decision);

  Json fields = incident_json(incident, *policy_, topology_, suspects_);
  fields["consecutive"] = budget_.consecutive();
  fields["total"] = budget_.total();
  if (incident.loss_scale) fields["pending"] = calibration_.pending();
  fields["reason"] = decision.reason;
  if (decision.evidence) fields["bundle"] = GenerationId{incident.epoch, incident.attempt}.name();
  if (decision.ends_run()) {
    fields["exit_code"] = decision.exit_code();
    fields["code"] = status_code_name(decision.code);
  }
  switch (decision.action) {
    case Action::kSkip: record("attempt_skipped", std::move(fields)); break;
    case Action::kStop: record("stopped", std::move(fields)); break;
    case Action::kRollBack: record("rolling_back", std::move(fields)); break;
    default: record("aborted", std::move(fields)); break;
  }
  record_rate_changes(incident.epoch, incident.attempt, incident.update);
  if (skipped) {
    // The batch of every rank is dropped with a skip, whoever saw the value.
    const int origin = is_calibration(*policy_, incident) ? -1 : skip_record(incident).rank;
    drop_samples(incident.epoch, incident.attempt, incident.update, origin);
  }
  write_memory();
  metrics_.count_incident();
  if (skipped) {
    metrics_.count_skip(incident.stage(), incident.counts());
  } else {
    decision.action == Action::kRollBack ? metrics_.count_rollback() : metrics_.count_ended_attempt();
  }
  update_metrics();
  // Before any rank is told: whoever leaves first makes mpirun end the others.
  if (decision.ends_run()) finish_metrics(decision.code);
  return decision;
}

}  // namespace holdfast
