#include "holdfast/step_guard.h"

#include <algorithm>

#include "guard_impl.h"
#include "layout_agreement.h"

namespace holdfast {

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
  impl_->add(stage, tensor, probe, 0, gradient.values.dtype);
  return probe;
}

void StepGuard::observe_measured(Stage stage, std::string_view tensor, const Probe& probe,
                                 std::int64_t offset, DType dtype) {
  impl_->add(stage, tensor, probe, offset, dtype);
}

void StepGuard::observe_bucket(Stage stage, const TensorView& bucket, std::span<const BucketSlice> layout) {
  for (const BucketSlice& slice : layout) {
    impl_->observe(stage, slice.tensor, bucket.slice(slice.offset, slice.count), 0);
  }
}

std::vector<SharePiece> StepGuard::share(std::span<const BucketSlice> layout) const {
  std::int64_t total = 0;
  for (const BucketSlice& slice : layout) total += slice.count;
  const std::int64_t ranks = std::ssize(impl_->replicas_);
  const std::int64_t rank = impl_->place_;
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
  if (probes.size() != layout.size()) {
    return report_error(Stage::kReduction, "observe_reduced(): " + std::to_string(probes.size()) +
                                               " probes for a layout of " + std::to_string(layout.size()) +
                                               " tensors");
  }
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

bool StepGuard::checks_update_before() const { return impl_->policy_.check_update() == Policy::BEFORE; }
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

Status StepGuard::agree_on_layout(std::span<const BucketSlice> layout) {
  return holdfast::agree_on_layout(impl_->collective_, layout, impl_->groups_);
}

bool StepGuard::wants_layers() const { return impl_->layers_.measures(); }
void StepGuard::observe_layer(Stage stage, EvidenceRecorder::Kind kind, std::string_view tensor,
                              const TensorView& view) {
  impl_->observe_layer(stage, kind, tensor, view);
}

void StepGuard::observe_loss(double loss) {
  impl_->log_.add_loss(loss);
  impl_->observe(Stage::kLoss, "loss", TensorView::of(std::span<const double>(&loss, 1)), 0);
}

void StepGuard::request_stop() { impl_->log_.request_stop(); }
void StepGuard::no_next_batch() { impl_->log_.set_no_next_batch(); }
Decision StepGuard::decide() { return impl_->decide(nullptr); }
Decision StepGuard::decide(DeviceAttempt& device) { return impl_->decide(&device); }
void StepGuard::reducing() { impl_->progress(Phase::kReduce); }
void StepGuard::begin_update() { impl_->progress(Phase::kUpdate); }
// So that a rank that waits for others after its update is not taken for one that is stuck in it.
void StepGuard::end_update() { impl_->progress(Phase::kUpdate); }
void StepGuard::report_failed_update(std::string_view what) { impl_->log_.set_failed_update(what); }
Status StepGuard::register_state(TrainingState state) { return impl_->register_state(std::move(state)); }
void StepGuard::provide_evidence(EvidenceProviders providers) {
  impl_->provide_evidence(std::move(providers));
}
const std::string& StepGuard::restored_from() const { return impl_->restored_from_; }
Decision StepGuard::roll_back() { return impl_->roll_back(); }
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
