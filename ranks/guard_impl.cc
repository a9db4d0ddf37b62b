// An attempt, from begin to finish.
#include "guard_impl.h"

#include <unistd.h>

#include <limits>
#include <thread>
#include <utility>

#include "caught.h"
#include "holdfast/coord/policy.h"
#include "holdfast/coord/state.pb.h"

namespace holdfast {
namespace {

// When a learning rate blows up every rank is bad, and a few of each node say all there is to say. What rank
// 0 receives on the bad path grows with the bad ranks, up to this many reports a node.
constexpr int kMostReportsPerNode = 4;

std::string host_name() {
  char host[256] = "";
  gethostname(host, sizeof(host) - 1);
  return host;
}

// For the watchdogs to find out who is missing and to put it on record, after a collective failed.
constexpr std::chrono::seconds kInquiryTime{3};

}  // namespace

StepGuard::Impl::Impl(Collective& collective, const Policy& policy, const GuardOptions& options,
                      std::unique_ptr<Coordinator> coordinator)
    : collective_(collective),
      options_(options),
      policy_(policy),
      policy_text_(holdfast::policy_text(policy)),
      policy_hash_(holdfast::policy_hash(policy)),
      coefficient_(agreement_coefficient(collective.rank(), collective.size())),
      groups_(collective.size()),
      coordinator_(std::move(coordinator)),
      log_(collective.rank(), host_name()),
      layers_(policy.evidence().layer_statistics_attempts()) {}

SpikeOptions StepGuard::Impl::spike_options() const {
  const Policy::Spike& spike = policy_.spike();
  return {spike.window_attempts(), spike.least_attempts(), spike.deviations()};
}

void StepGuard::Impl::progress(Phase phase) {
  if (watchdog_) watchdog_->board().enter(epoch_, attempt_, phase);
}

void StepGuard::Impl::begin() {
  progress(Phase::kBegin);
  log_.clear();
  snapshot_.take();
  watched_.clear();
  layers_.begin(epoch_, attempt_);
  applied_ = false;
  overflowed_ = false;
  report_checkpoints();
  if (coordinator_) coordinator_->report_evidence();
  begin_sweep_if_due();
}

Probe StepGuard::Impl::observe(Stage stage, std::string_view tensor, const TensorView& view,
                               std::int64_t offset) {
  if (!is_known(view.dtype)) {
    log_.set_error(stage, std::string(tensor) + " has an unknown dtype, number " +
                              std::to_string(static_cast<int>(view.dtype)) + ", and cannot be scanned");
  }
  // What cannot be looked at is not clean.
  if (view.element_count < 0 || (view.element_count > 0 && view.data == nullptr)) {
    log_.set_error(stage, std::string(tensor) + " has " + std::to_string(view.element_count) + " elements" +
                              (view.data == nullptr ? " and no memory" : "") + ", and cannot be scanned");
    return Probe();
  }
  const Probe probe = scan(view);
  add(stage, tensor, probe, offset, view.dtype);
  return probe;
}

void StepGuard::Impl::add(Stage stage, std::string_view tensor, const Probe& probe, std::int64_t offset,
                          DType dtype) {
  const int number = static_cast<int>(stage);
  if (number >= 0 && number < kStageCount) {
    log_.add(stage, tensor, probe, offset, dtype);
  } else {
    log_.set_error(Stage::kInput, std::string(tensor) + " was observed at stage number " +
                                      std::to_string(number) + ", which there is not");
  }
  progress(Phase::kObserve);
}

void StepGuard::Impl::observe_layer(Stage stage, EvidenceRecorder::Kind kind, std::string_view tensor,
                                    const TensorView& view) {
  if (!layers_.measures()) return;
  const bool scaled = scaler_ && scaler_->scale() != 1 && stage == Stage::kBackward;
  layers_.add(stage, kind, tensor, view.dtype, scan(view), scaled);
}

// The spine of the product: probes became a record, the records become a verdict, the verdict a decision.
Decision StepGuard::Impl::decide(DeviceAttempt* device) {
  if (coordinator_ && coordinator_->taken_over()) log_.request_stop();
  if (coordinator_ && !closing_ && coordinator_->stop_requested()) log_.request_stop();
  for (const ProtectedBuffer& buffer : scanned_buffers_) {
    log_.add(Stage::kForward, buffer.name, scan(buffer.view), 0, buffer.view.dtype);
  }
  end_sweep();
  log_.claim({epoch_, attempt_, policy_hash_});
  progress(Phase::kDecide);
  Record record = log_.record(agreement_lane());
  if (store_ && store_->in_flight() && store_->part_done()) record.set_part_done();
  if (Status s = sum(device, &record); !s.ok()) return end_attempt(broken(s));
  const Verdict verdict = judge(record, collective_.size());
  if (device != nullptr) learn_from(*device, verdict);
  count_proof(verdict);
  if (store_ && verdict.kind != Verdict::Kind::kDisagree) judge_checkpoint(verdict);
  return end_attempt(verdict.clean() ? apply() : decide_on_incident(verdict), verdict);
}

Status StepGuard::Impl::sum(DeviceAttempt* device, Record* record) {
  if (device == nullptr) return collective_.reduce(*record);
  if (device->rank() != collective_.rank() || device->size() != collective_.size()) {
    return Status::usage("the device is rank " + std::to_string(device->rank()) + " of " +
                         std::to_string(device->size()) + ", the guard " +
                         std::to_string(collective_.rank()) + " of " + std::to_string(collective_.size()) +
                         ": decide() needs the same ranks in the same order");
  }
  return caught([&] { return device->sum(record); });
}

// The verdict stands. What the device has to add goes into this rank's report, or into its next record.
void StepGuard::Impl::learn_from(DeviceAttempt& device, const Verdict& verdict) {
  if (verdict.clean()) {
    if (Status s = caught([&] { return device.update_status(); }); !s.ok()) {
      log_.set_failed_update(s.message());
    }
    return;
  }
  std::vector<DeviceMeasurement> all;
  if (Status s = caught([&] { return device.measured(&all); }); !s.ok()) {
    log_.set_error(Stage::kReduction, s.message());
  }
  for (const DeviceMeasurement& one : all) log_.add(one.stage, one.tensor, one.probe, one.offset, one.dtype);
  progress(Phase::kDecide);
}

void StepGuard::Impl::finish() {
  if (layers_.measures()) end_layers();
  if (scaler_) update_scale();
  if (std::exchange(applied_, false)) ++updates_;
  ++attempt_;
  for (const auto& [name, value] : watched_) detectors_.at(name).remember(value);
  if (!ended_ && checkpoint_due()) save_checkpoint();
  progress(Phase::kOutside);
}

bool StepGuard::Impl::watch(std::string_view name, double value) {
  if (coordinator_) coordinator_->metrics().set_watched(name, value);
  SpikeDetector& detector = detectors_.try_emplace(std::string(name), spike_options()).first->second;
  double threshold = 0;
  watched_.emplace_back(name, value);  // an attempt that is made again must not count twice
  if (!detector.is_spike(value, &threshold)) return false;
  if (coordinator_) coordinator_->spike(epoch_, attempt_, updates_, name, value, threshold);
  if (policy_.spike().action() == Policy::Spike::SKIP) {
    log_.fire_rule("spike of " + std::string(name) + ": " + std::to_string(value) + ", above " +
                   std::to_string(threshold));
  }
  return true;
}

// Raised once, and again after it has been clear by a factor of two.
void StepGuard::Impl::watch_headroom(std::string_view tensor, DType dtype, double abs_max) {
  const double part = abs_max / dtype_largest(dtype);
  if (coordinator_) coordinator_->metrics().set_headroom(tensor, part);
  const auto raised = low_headroom_.find(tensor);
  const double warn = policy_.headroom_warning();
  if (part > warn && raised == low_headroom_.end()) {
    low_headroom_.emplace(tensor);
    if (coordinator_) {
      coordinator_->headroom(epoch_, attempt_, updates_, tensor, abs_max, dtype_largest(dtype));
    }
  } else if (part < warn / 2 && raised != low_headroom_.end()) {
    low_headroom_.erase(raised);
  }
}

Decision StepGuard::Impl::close() {
  log_.clear();
  snapshot_.take();
  closing_ = true;
  if (coordinator_) coordinator_->look_for_takeover();
  if (store_ && !store_->in_flight() && saved_at_ != attempt_) save_checkpoint();
  if (sweep_) begin_sweep(StateSweep::Scope::kEverything);
  const Decision decision = decide(nullptr);
  if (!decision.apply()) return decision;
  if (store_) {
    if (Status s = leave_checkpoint(); !s.ok()) return broken(s);
  }
  finish_evidence();
  if (coordinator_) coordinator_->run_finished(epoch_, attempt_, updates_);
  return decision;
}

std::uint64_t StepGuard::Impl::agreement_lane() const {
  return coefficient_ * agreement_hash({epoch_, attempt_, policy_hash_});
}

void StepGuard::Impl::update_scale() {
  const double before = scaler_->scale();
  if (applied_) scaler_->on_clean_update();
  if (overflowed_) scaler_->on_overflow();
  if (coordinator_ && scaler_->scale() != before) {
    coordinator_->scale_changed(epoch_, attempt_, updates_, before, scaler_->scale());
  }
}

// For rank 0's memory, which is written before finish().
void StepGuard::Impl::keep_scaler() {
  if (!scaler_) return;
  LossScaler after = *scaler_;
  after.on_clean_update();
  const LossScaler::State& state = after.state();
  coordinator_->keep_loss_scale(state.scale, state.clean_updates, state.overflows_to_halve);
}

Decision StepGuard::Impl::apply() {
  if (coordinator_ && !closing_) {
    keep_scaler();
    coordinator_->update_applied(epoch_, attempt_, updates_);
  }
  return {Action::kApply, StatusCode::kOk, {}};
}

// Bad ranks report, rank 0 decides, all are told. Every rank takes part, in the same two collectives.
Decision StepGuard::Impl::decide_on_incident(const Verdict& verdict) {
  // With ranks missing there is nobody to talk to.
  if (verdict.kind == Verdict::Kind::kMissing) {
    return broken({StatusCode::kRankMissing, "a rank did not take part in the attempt"});
  }
  std::vector<Bytes> reports;
  // A disagreement is told from what every rank claims; those reports are a few words each.
  const bool from_all = verdict.kind == Verdict::Kind::kDisagree || verdict.kind == Verdict::Kind::kDiverged;
  const int most = from_all ? std::numeric_limits<int>::max() : kMostReportsPerNode;
  if (Status s = collective_.gather(report(verdict), &reports, most); !s.ok()) return broken(s);
  Bytes message;
  if (coordinator_) message = encode_decision(coordinator_->handle(incident(verdict, reports)));
  if (Status s = collective_.broadcast(&message); !s.ok()) return broken(s);
  Decision decision;
  // Fails closed: an attempt that is not clean is never applied, not even by order.
  if (!decode_decision(message, &decision) || decision.apply()) {
    return broken(Status::internal("malformed decision from rank 0"));
  }
  return decision;
}

Incident StepGuard::Impl::incident(const Verdict& verdict, const std::vector<Bytes>& reports) const {
  Incident incident{epoch_, attempt_, updates_, verdict, {}, {}};
  incident.closing = closing_;
  if (verdict.kind == Verdict::Kind::kDiverged) incident.proven_tensors = sweep_->proven();
  if (!groups_.only_one()) {
    for (int r = 0; r < collective_.size(); ++r) incident.replica_groups.push_back(groups_.name_of(r));
  }
  if (scaler_) {
    LossScaler after = *scaler_;
    if (verdict.gradient_overflow()) after.on_overflow();
    const LossScaler::State& state = after.state();
    incident.loss_scale = {scaler_->scale(), scaler_->exhausted_by_overflow(),
                           LossScaleView::State{state.scale, state.clean_updates, state.overflows_to_halve}};
  }
  for (const Bytes& bytes : reports) {
    RankView view;
    if (!bytes.empty() && decode_rank_view(bytes, &view)) incident.views.push_back(std::move(view));
  }
  return incident;
}

// A transport that says that it failed, as Gloo and NCCL do, leaves this rank free while others may hang: it
// is the watchdogs that know who is gone. If somebody is, this process ends in here, as all do.
Decision StepGuard::Impl::broken(const Status& status) {
  Decision decision{Action::kAbort, status.code(), status.message()};
  decision.agreed = false;
  if (status.code() == StatusCode::kRankMissing && watchdog_) {
    watchdog_->group_failed(status.message());
    if (asks_peers_) std::this_thread::sleep_for(kInquiryTime);
  }
  if (coordinator_) coordinator_->run_broken(epoch_, attempt_, updates_, decision);
  ended_ = true;
  return decision;
}

Decision StepGuard::Impl::end_attempt(Decision decision, const Verdict& verdict) {
  decision.last_attempt_with_data = verdict.last_attempt_with_data;
  applied_ = decision.apply();
  ended_ = decision.ends_run();
  if (decision.action == Action::kSkip) {
    ++skips_;
    overflowed_ = verdict.gradient_overflow();
    proof_wanted_ = true;
  }
  if (!applied_) snapshot_.restore();
  if (decision.evidence) {
    layers_.incident();
    if (Status s = collect_evidence(for_this_rank(*decision.evidence)); !s.ok()) return broken(s);
    if (decision.ends_run()) {
      finish_evidence();
      // Whoever leaves first makes mpirun end the others.
      if (Status s = agree_on_status(collective_, Status()); !s.ok()) return broken(s);
    }
  }
  // Ranks that disagree may not even have the same checkpoint in flight.
  if (store_ && decision.agreed && verdict.kind != Verdict::Kind::kDisagree) {
    if (Status s = settle_checkpoint(decision, verdict); !s.ok()) return broken(s);
  }
  return decision;
}

}  // namespace holdfast
