#include "holdfast/step_guard.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <map>
#include <optional>
#include <set>

#include "attempt_log.h"
#include "buffer_snapshot.h"
#include "layout_agreement.h"
#include "holdfast/coord/policy.pb.h"
#include "holdfast/coord/state.pb.h"
#include "holdfast/collectives/hardware.h"
#include "holdfast/collectives/verdict.h"
#include "holdfast/collectives/watchdog.h"
#include "holdfast/coord/coordinator.h"
#include "holdfast/coord/departure_log.h"
#include "holdfast/coord/policy.h"
#include "holdfast/spike_detector.h"

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

std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<std::int64_t>(std::ceil(seconds * 1000)));
}

// Collective. The rank that reports a departure need not be rank 0, but it is rank 0's folder that it writes
// to.
Status start_watchdog(Collective& collective, const Policy& policy, const GuardOptions& guard_options,
                      Coordinator* coordinator, std::unique_ptr<Watchdog>* out) {
  const std::string& run_dir = guard_options.run_dir;
  // Rank 0's word on what decides which collectives follow: policies are compared in the first attempt only.
  Bytes folder = policy.side_channel() ? "+" : "-";
  if (!run_dir.empty()) folder += std::filesystem::absolute(run_dir).string();
  if (Status s = collective.broadcast(&folder); !s.ok()) return s;
  const bool side_channel = folder.starts_with('+');
  folder.erase(0, 1);
  Watchdog::Options options;
  options.deadline = milliseconds(policy.attempt_deadline_seconds());
  options.floor = milliseconds(policy.attempt_deadline_floor_seconds());
  options.side_channel = side_channel;
  options.asked_to_end = guard_options.asked_to_end;
  if (coordinator != nullptr) {
    options.heard = [coordinator](std::vector<RankReport> reports) {
      coordinator->heard(std::move(reports));
    };
  }
  if (!folder.empty()) {
    // There is nobody left to tell of a failure, and the same is on stderr.
    options.record = [folder](const Departure& departure) {
      static_cast<void>(append_departure(folder, departure));
    };
  }
  return Watchdog::create(collective, options, out);
}

Decision failed(const Status& status) {
  Decision decision{Action::kAbort, status.code(), status.message()};
  decision.agreed = false;
  return decision;
}

}  // namespace

// A floating-point buffer that forward mutates.
struct ProtectedBuffer {
  std::string name;
  TensorView view;
};

class StepGuard::Impl {
 public:
  Impl(Collective& collective, const Policy& policy, std::unique_ptr<Coordinator> coordinator)
      : collective_(collective),
        policy_text_(holdfast::policy_text(policy)),
        policy_hash_(holdfast::policy_hash(policy)),
        coefficient_(agreement_coefficient(collective.rank(), collective.size())),
        coordinator_(std::move(coordinator)),
        checks_update_before_(policy.check_update() == Policy::BEFORE),
        spike_options_{policy.spike().window_attempts(), policy.spike().least_attempts(),
                       policy.spike().deviations()},
        spikes_skip_(policy.spike().action() == Policy::Spike::SKIP),
        headroom_part_(policy.headroom_warning()),
        log_(collective.rank(), host_name()) {}

  void scale_loss(const Policy::LossScale& policy) {
    scaler_.emplace(LossScaleOptions{policy.initial(), policy.largest(), policy.smallest(),
                                     policy.growth_interval(), policy.hysteresis()});
  }

  // Collective: where rank 0 says that the run is.
  Status take_position() {
    RunState position;
    if (coordinator_) {
      const RunState& memory = coordinator_->memory();
      position.set_epoch(memory.epoch());
      position.set_attempt(memory.attempt());
      position.set_update(memory.update());
      position.set_skips(memory.skips());
      if (memory.has_loss_scale()) *position.mutable_loss_scale() = memory.loss_scale();
    }
    Bytes bytes = position.SerializeAsString();
    if (Status s = collective_.broadcast(&bytes); !s.ok()) return s;
    if (!position.ParseFromString(bytes)) return Status::internal("malformed position from rank 0");
    epoch_ = position.epoch();
    attempt_ = position.attempt();
    updates_ = position.update();
    skips_ = position.skips();
    return agree_on_status(collective_, take_loss_scale(position));
  }

  // What the policy of this start no longer allows is brought to the nearest that it does.
  Status take_loss_scale(const RunState& position) {
    if (!scaler_ || !position.has_loss_scale()) return Status();
    const LossScaleOptions& options = scaler_->options();
    const auto& saved = position.loss_scale();
    return scaler_->restore({std::clamp(saved.scale(), options.smallest, options.largest),
                             std::min(saved.clean_updates(), options.growth_interval - 1),
                             std::min(saved.overflows_to_halve(), options.hysteresis)});
  }

  void progress(Phase phase) {
    if (watchdog_) watchdog_->board().enter(epoch_, attempt_, phase);
  }

  void begin() {
    progress(Phase::kBegin);
    log_.clear();
    snapshot_.take();
    applied_ = false;
    overflowed_ = false;
  }

  Probe observe(Stage stage, std::string_view tensor, const TensorView& view, std::int64_t offset) {
    if (!is_known(view.dtype)) {
      log_.set_error(stage, std::string(tensor) + " has an unknown dtype, number " +
                                std::to_string(static_cast<int>(view.dtype)) + ", and cannot be scanned");
    }
    const Probe probe = scan(view);
    add(stage, tensor, probe, offset);
    return probe;
  }

  void add(Stage stage, std::string_view tensor, const Probe& probe, std::int64_t offset) {
    log_.add(stage, tensor, probe, offset);
    progress(Phase::kObserve);
  }

  // The spine of the product: probes became a record, the records become a verdict, the verdict a decision.
  Decision decide() {
    if (coordinator_ && coordinator_->taken_over()) log_.request_stop();
    if (coordinator_ && !closing_ && coordinator_->stop_requested()) log_.request_stop();
    for (const ProtectedBuffer& buffer : scanned_buffers_) {
      log_.add(Stage::kForward, buffer.name, scan(buffer.view), 0);
    }
    log_.claim({epoch_, attempt_, policy_hash_});
    progress(Phase::kDecide);
    Record record = log_.record(agreement_lane());
    if (Status s = collective_.reduce(record); !s.ok()) return end_attempt(failed(s));
    const Verdict verdict = judge(record, collective_.size());
    return end_attempt(verdict.clean() ? apply() : decide_on_incident(verdict), verdict);
  }

  void finish() {
    if (scaler_) update_scale();
    if (applied_) ++updates_;
    ++attempt_;
    progress(Phase::kOutside);
  }

  bool watch(std::string_view name, double value) {
    if (coordinator_) coordinator_->metrics().set_watched(name, value);
    SpikeDetector& detector = detectors_.try_emplace(std::string(name), spike_options_).first->second;
    double threshold = 0;
    if (!detector.add(value, &threshold)) return false;
    if (coordinator_) coordinator_->spike(epoch_, attempt_, updates_, name, value, threshold);
    if (spikes_skip_) {
      log_.fire_rule("spike of " + std::string(name) + ": " + std::to_string(value) + ", above " +
                     std::to_string(threshold));
    }
    return true;
  }

  // Raised once, and again after it has been clear by a factor of two.
  void watch_headroom(std::string_view tensor, DType dtype, double abs_max) {
    const double part = abs_max / dtype_largest(dtype);
    if (coordinator_) coordinator_->metrics().set_headroom(tensor, part);
    const auto raised = low_headroom_.find(tensor);
    if (part > headroom_part_ && raised == low_headroom_.end()) {
      low_headroom_.emplace(tensor);
      if (coordinator_) {
        coordinator_->headroom(epoch_, attempt_, updates_, tensor, abs_max, dtype_largest(dtype));
      }
    } else if (part < headroom_part_ / 2 && raised != low_headroom_.end()) {
      low_headroom_.erase(raised);
    }
  }

  Decision close() {
    log_.clear();
    closing_ = true;
    if (coordinator_) coordinator_->look_for_takeover();
    const Decision decision = decide();
    if (decision.apply() && coordinator_) coordinator_->run_finished(epoch_, attempt_, updates_);
    return decision;
  }

  Collective& collective_;
  const std::string policy_text_;
  const std::uint64_t policy_hash_;
  const std::uint64_t coefficient_;                 // of this rank in the agreement lane
  const std::unique_ptr<Coordinator> coordinator_;  // on rank 0 only
  std::string topology_map_;                        // on rank 0 only

  const bool checks_update_before_;
  const SpikeOptions spike_options_;
  const bool spikes_skip_;
  const double headroom_part_;

  std::uint64_t epoch_ = 0;
  std::uint64_t attempt_ = 0;
  std::uint64_t updates_ = 0;
  std::uint64_t skips_ = 0;
  bool applied_ = false;     // the running attempt was decided APPLY
  bool closing_ = false;     // what is decided is the end of the run, not an attempt
  bool overflowed_ = false;  // the running attempt was skipped for a gradient overflow
  AttemptLog log_;
  BufferSnapshot snapshot_;
  std::vector<ProtectedBuffer> scanned_buffers_;
  std::optional<LossScaler> scaler_;
  std::map<std::string, SpikeDetector, std::less<>> detectors_;
  std::set<std::string, std::less<>> low_headroom_;  // tensors that were warned of
  std::unique_ptr<Watchdog> watchdog_;               // last: its thread ends first

 private:
  std::uint64_t agreement_lane() const {
    return coefficient_ * agreement_hash({epoch_, attempt_, policy_hash_});
  }

  void update_scale() {
    const double before = scaler_->scale();
    if (applied_) scaler_->on_clean_update();
    if (overflowed_) scaler_->on_overflow();
    if (coordinator_ && scaler_->scale() != before) {
      coordinator_->scale_changed(epoch_, attempt_, updates_, before, scaler_->scale());
    }
  }

  // For rank 0's memory, which is written before finish().
  void keep_scaler() {
    if (!scaler_) return;
    LossScaler after = *scaler_;
    after.on_clean_update();
    const LossScaler::State& state = after.state();
    coordinator_->keep_loss_scale(state.scale, state.clean_updates, state.overflows_to_halve);
  }

  Decision apply() {
    if (coordinator_ && !closing_) {
      keep_scaler();
      coordinator_->update_applied(epoch_, attempt_, updates_);
    }
    return {Action::kApply, StatusCode::kOk, {}};
  }

  // Bad ranks report, rank 0 decides, all are told. Every rank takes part, in the same two collectives.
  Decision decide_on_incident(const Verdict& verdict) {
    // With ranks missing there is nobody to talk to.
    if (verdict.kind == Verdict::Kind::kMissing) {
      return failed({StatusCode::kRankMissing, "a rank did not take part in the attempt"});
    }
    std::vector<Bytes> reports;
    // A disagreement is told from what every rank claims; those reports are a few words each.
    const bool from_all = verdict.kind == Verdict::Kind::kDisagree;
    const int most = from_all ? std::numeric_limits<int>::max() : kMostReportsPerNode;
    if (Status s = collective_.gather(log_.report(verdict), &reports, most); !s.ok()) return failed(s);
    Bytes message;
    if (coordinator_) message = encode_decision(coordinator_->handle(incident(verdict, reports)));
    if (Status s = collective_.broadcast(&message); !s.ok()) return failed(s);
    Decision decision;
    // Fails closed: an attempt that is not clean is never applied, not even by order.
    if (!decode_decision(message, &decision) || decision.apply()) {
      return failed(Status::internal("malformed decision from rank 0"));
    }
    return decision;
  }

  Incident incident(const Verdict& verdict, const std::vector<Bytes>& reports) const {
    Incident incident{epoch_, attempt_, updates_, verdict, {}, {}};
    incident.closing = closing_;
    if (scaler_) {
      LossScaler after = *scaler_;
      if (verdict.gradient_overflow()) after.on_overflow();
      const LossScaler::State& state = after.state();
      incident.loss_scale = {
          scaler_->scale(), scaler_->exhausted_by_overflow(),
          LossScaleView::State{state.scale, state.clean_updates, state.overflows_to_halve}};
    }
    for (const Bytes& bytes : reports) {
      RankView view;
      if (!bytes.empty() && decode_rank_view(bytes, &view)) incident.views.push_back(std::move(view));
    }
    return incident;
  }

  Decision end_attempt(Decision decision, const Verdict& verdict = {}) {
    if (!decision.agreed && coordinator_) coordinator_->run_broken(epoch_, attempt_, updates_, decision);
    decision.last_attempt_with_data = verdict.last_attempt_with_data;
    applied_ = decision.apply();
    if (decision.action == Action::kSkip) {
      ++skips_;
      overflowed_ = verdict.gradient_overflow();
    }
    if (!applied_) snapshot_.restore();
    return decision;
  }
};

Status StepGuard::create(Collective& collective, const GuardOptions& options,
                         std::unique_ptr<StepGuard>* out) {
  Policy policy;
  std::unique_ptr<Coordinator> coordinator;
  Status status = parse_policy(options.policy, &policy);
  if (status.ok() && options.expected_ranks != 0 && options.expected_ranks != collective.size()) {
    status = {StatusCode::kRanksDisagree, std::to_string(options.expected_ranks) +
                                              " ranks are expected, but " +
                                              std::to_string(collective.size()) + " take part"};
  }
  if (status.ok() && collective.rank() == 0) {
    status = options.resume ? Coordinator::resume(policy, options.run_dir, &coordinator)
                            : Coordinator::create(policy, options.run_dir, &coordinator);
  }
  if (status.ok() && coordinator && options.metrics_port) {
    status = coordinator->serve_metrics(options.metrics_address, *options.metrics_port);
  }
  if (Status s = agree_on_status(collective, status); !s.ok()) return s;
  auto impl = std::make_unique<Impl>(collective, policy, std::move(coordinator));
  if (options.loss_scaling) impl->scale_loss(policy.loss_scale());
  if (Status s = impl->take_position(); !s.ok()) return s;
  if (options.watchdog) {
    if (Status s = start_watchdog(collective, policy, options, impl->coordinator_.get(), &impl->watchdog_);
        !s.ok())
      return s;
  }
  Topology topology;
  RankPlacement placement = detect_placement(collective.rank());
  placement.axes = options.axes;
  if (Status s = gather_topology(collective, std::move(placement), &topology); !s.ok()) return s;
  impl->topology_map_ = topology.map();
  if (impl->coordinator_) impl->coordinator_->run_started(impl->epoch_, std::move(topology));
  out->reset(new StepGuard(std::move(impl)));
  return Status();
}

StepGuard::StepGuard(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
StepGuard::~StepGuard() = default;

void StepGuard::protect(void* data, std::size_t bytes) { impl_->snapshot_.add(data, bytes); }
void StepGuard::protect(std::string_view name, void* data, DType dtype, std::int64_t element_count) {
  protect(data, static_cast<std::size_t>(element_count * dtype_size(dtype)));
  impl_->scanned_buffers_.push_back({std::string(name), TensorView::contiguous(data, dtype, element_count)});
}
void StepGuard::begin() { impl_->begin(); }
void StepGuard::micro_batch(int index) { impl_->log_.micro_batch(index); }

void StepGuard::report_error(Stage stage, std::string_view what) { impl_->log_.set_error(stage, what); }
bool StepGuard::healthy() const { return !impl_->log_.has_error(); }

Probe StepGuard::observe(Stage stage, std::string_view tensor, const TensorView& view, std::int64_t offset) {
  return impl_->observe(stage, tensor, view, offset);
}

Probe StepGuard::observe(Stage stage, std::string_view tensor, const SparseView& gradient) {
  Probe probe;
  if (Status s = scan_sparse(gradient, &probe); !s.ok()) {
    impl_->log_.set_error(stage, std::string(tensor) + ": " + s.message());
  }
  impl_->add(stage, tensor, probe, 0);
  return probe;
}

void StepGuard::observe_measured(Stage stage, std::string_view tensor, const Probe& probe,
                                 std::int64_t offset) {
  impl_->add(stage, tensor, probe, offset);
}

void StepGuard::observe_bucket(Stage stage, const TensorView& bucket, std::span<const BucketSlice> layout) {
  for (const BucketSlice& slice : layout) {
    impl_->observe(stage, slice.tensor, bucket.slice(slice.offset, slice.count), 0);
  }
}

std::vector<SharePiece> StepGuard::share(std::span<const BucketSlice> layout) const {
  std::int64_t total = 0;
  for (const BucketSlice& slice : layout) total += slice.count;
  const std::int64_t ranks = impl_->collective_.size();
  const std::int64_t rank = impl_->collective_.rank();
  // Elements [begin, end) of the tensors laid end to end, without padding.
  const std::int64_t begin = total / ranks * rank + std::min(rank, total % ranks);
  const std::int64_t end = begin + total / ranks + (rank < total % ranks ? 1 : 0);
  std::vector<SharePiece> pieces;
  std::int64_t position = 0;
  for (const BucketSlice& slice : layout) {
    const std::int64_t from = std::max(begin, position) - position;
    const std::int64_t to = std::min(end, position + slice.count) - position;
    if (from < to) pieces.push_back({slice.tensor, slice.offset + from, from, to - from});
    position += slice.count;
  }
  return pieces;
}

void StepGuard::observe_share(const TensorView& bucket, std::span<const BucketSlice> layout) {
  for (const SharePiece& piece : share(layout)) {
    impl_->observe(Stage::kReduction, piece.tensor, bucket.slice(piece.bucket_offset, piece.count),
                   piece.begin);
  }
}

void StepGuard::observe_reduced(const TensorView& bucket, std::span<const BucketSlice> layout,
                                std::span<const Probe> probes) {
  const auto bad = std::ranges::find_if(probes, [](const Probe& probe) { return !probe.finite(); });
  if (bad == probes.end()) return;
  bool in_share = false;
  for (const SharePiece& piece : share(layout)) {
    const TensorView part = bucket.slice(piece.bucket_offset, piece.count);
    in_share |= !impl_->observe(Stage::kReduction, piece.tensor, part, piece.begin).finite();
  }
  if (in_share) return;
  // Another rank's share, as a rule. If it is in no share, memory went bad here alone.
  impl_->log_.fire_rule("the reduced gradient of " +
                        std::string(layout[static_cast<std::size_t>(bad - probes.begin())].tensor) +
                        " is not finite on rank " + std::to_string(impl_->collective_.rank()) +
                        ", though it was on the rank whose share it is");
}

bool StepGuard::checks_update_before() const { return impl_->checks_update_before_; }
void StepGuard::observe_written(std::string_view tensor, const TensorView& view) {
  impl_->log_.add_written(tensor, scan(view), 0);
}

void StepGuard::annotate(std::string_view name, std::int64_t value) { impl_->log_.annotate(name, value); }
void StepGuard::keep_ledger(SampleSource source) {
  if (impl_->coordinator_) impl_->coordinator_->keep_ledger(std::move(source));
}
bool StepGuard::watch(std::string_view name, double value) { return impl_->watch(name, value); }
void StepGuard::watch_headroom(std::string_view tensor, DType dtype, double abs_max) {
  impl_->watch_headroom(tensor, dtype, abs_max);
}

double StepGuard::loss_scale() const { return impl_->scaler_ ? impl_->scaler_->scale() : 1.0; }
LossScaler::State StepGuard::loss_scale_state() const {
  return impl_->scaler_ ? impl_->scaler_->state() : LossScaler::State();
}
Status StepGuard::restore_loss_scale(const LossScaler::State& state) {
  return impl_->scaler_ ? impl_->scaler_->restore(state) : Status();
}

Status StepGuard::agree_on_layout(std::span<const BucketSlice> layout, int replica_group) {
  return holdfast::agree_on_layout(impl_->collective_, layout, replica_group);
}

void StepGuard::observe_loss(double loss) {
  impl_->log_.add_loss(loss);
  impl_->observe(Stage::kLoss, "loss", TensorView::of(std::span<const double>(&loss, 1)), 0);
}

void StepGuard::request_stop() { impl_->log_.request_stop(); }
void StepGuard::no_next_batch() { impl_->log_.set_no_next_batch(); }
Decision StepGuard::decide() { return impl_->decide(); }
void StepGuard::begin_update() { impl_->progress(Phase::kUpdate); }
// So that a rank that waits for others after its update is not taken for one that is stuck in it.
void StepGuard::end_update() { impl_->progress(Phase::kUpdate); }
void StepGuard::report_failed_update(std::string_view what) { impl_->log_.set_failed_update(what); }
void StepGuard::finish() { impl_->finish(); }
Decision StepGuard::close() { return impl_->close(); }

void StepGuard::pause_watchdog() {
  if (impl_->watchdog_) impl_->watchdog_->board().pause();
}
void StepGuard::resume_watchdog() {
  if (impl_->watchdog_) impl_->watchdog_->board().resume();
}

std::uint64_t StepGuard::epoch() const { return impl_->epoch_; }
std::uint64_t StepGuard::attempt() const { return impl_->attempt_; }
std::uint64_t StepGuard::updates() const { return impl_->updates_; }
std::uint64_t StepGuard::skips() const { return impl_->skips_; }
const std::string& StepGuard::policy_text() const { return impl_->policy_text_; }
const std::string& StepGuard::topology_map() const { return impl_->topology_map_; }
std::string StepGuard::metrics_url() const {
  return impl_->coordinator_ ? impl_->coordinator_->metrics_url() : "";
}

}  // namespace holdfast
