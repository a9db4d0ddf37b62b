// What is seen of an attempt that is made again, and how it compares with what was recorded.
#include <fmt/format.h>

#include <exception>

#include "holdfast/coord/evidence/evidence.pb.h"
#include "holdfast/coord/incident.h"
#include "holdfast/coord/printable.h"
#include "replay_bundle.h"

namespace holdfast {

std::string Boundary::describe() const {
  if (!error.empty()) return fmt::format("exception at {}: {}", stage_name(stage), printable(error));
  return fmt::format("{} {}[{}]: {} NaN, {} +Inf, {} -Inf", stage_name(stage), printable(tensor), index,
                     counts.nan, counts.pos_inf, counts.neg_inf);
}

ReplayWatcher::ReplayWatcher() : recorder_(0, "", false, 0) {}

bool ReplayWatcher::run(Stage stage, const std::function<void()>& body) {
  if (error_) return false;
  stage_ = stage;
  try {
    body();
  } catch (const std::exception& error) {
    fail(error.what());
  } catch (...) {
    fail("exception of unknown type");
  }
  return !error_;
}

// The first failure counts, at the stage that ran last.
void ReplayWatcher::fail(std::string_view what) {
  if (!error_) error_ = Boundary{stage_, "", -1, {}, std::string(what)};
}

void ReplayWatcher::lacks(std::string_view what) {
  if (missing_.empty()) missing_ = printable(what);
}

void ReplayWatcher::observe(Stage stage, std::string_view tensor, const TensorView& view, int micro_batch,
                            std::int64_t offset) {
  see(stage, tensor, scan(view), offset);
  layer(stage, EvidenceRecorder::Kind::kOther, tensor, view, micro_batch, false);
}

void ReplayWatcher::observe_loss(double loss, int micro_batch) {
  observe(Stage::kLoss, "loss", TensorView::of(std::span(&loss, 1)), micro_batch);
}

void ReplayWatcher::layer(Stage stage, EvidenceRecorder::Kind kind, std::string_view tensor,
                          const TensorView& values, int micro_batch, bool scaled) {
  recorder_.layer(stage, kind, tensor, values, micro_batch, scaled);
}

void ReplayWatcher::note(std::string_view what, std::string_view text) { notes_.emplace_back(what, text); }

// Keeps each stage's first finding, as the guard does.
void ReplayWatcher::see(Stage stage, std::string_view tensor, const Probe& probe, std::int64_t offset) {
  if (probe.finite()) return;
  const auto s = static_cast<std::size_t>(stage);
  if (!first_[s]) first_[s] = Boundary{stage, std::string(tensor), offset + probe.first_bad, {}, {}};
  // As much as a rank reports: the counts of its first tensors.
  if (tensors_[s]++ < kMaxFindingsPerRank) first_[s]->counts += probe.bad;
}

std::optional<Boundary> ReplayWatcher::earliest() const {
  for (const auto& first : first_) {
    if (first) return first;
  }
  return error_;
}

// ---- comparison

bool within_classes(const BadCounts& found, const BadCounts& recorded) {
  const auto on_record = [](std::uint64_t mine, std::uint64_t theirs) { return mine == 0 || theirs > 0; };
  return on_record(found.nan, recorded.nan) && on_record(found.pos_inf, recorded.pos_inf) &&
         on_record(found.neg_inf, recorded.neg_inf);
}

bool same_place(const Boundary& found, const Boundary& recorded) {
  return found.stage == recorded.stage && found.tensor == recorded.tensor && found.index == recorded.index &&
         found.error == recorded.error;
}

// A sum is made again at one index and an update for one tensor, where the rank counted all of its share: of
// their counts no more can be told than that each class was on record.
bool is_made_in_part(Stage stage) { return stage == Stage::kReduction || stage == Stage::kOptimizer; }

bool same_boundary(const Boundary& found, const Boundary& recorded) {
  return same_place(found, recorded) && within_classes(found.counts, recorded.counts) &&
         (is_made_in_part(recorded.stage) || within_classes(recorded.counts, found.counts));
}

namespace {

std::string key_of(const TensorProbe& probe) {
  return fmt::format("{} {} {}", probe.stage(), probe.micro_batch(), probe.tensor());
}

// NaN cannot be among them, and of zero there is one.
bool same_bits(const TensorProbe& a, const TensorProbe& b) {
  return a.elements() == b.elements() && a.nan() == b.nan() && a.pos_inf() == b.pos_inf() &&
         a.neg_inf() == b.neg_inf() && a.first_bad() == b.first_bad() && !(a.abs_max() < b.abs_max()) &&
         !(b.abs_max() < a.abs_max()) && !(a.root_mean_square() < b.root_mean_square()) &&
         !(b.root_mean_square() < a.root_mean_square());
}

}  // namespace

BitComparison compare_measurements(const EvidencePart& found, const EvidencePart& recorded) {
  std::multimap<std::string, const TensorProbe*> known;
  for (const TensorProbe& probe : recorded.layers()) known.emplace(key_of(probe), &probe);
  BitComparison comparison;
  for (const TensorProbe& probe : found.layers()) {
    auto [at, end] = known.equal_range(key_of(probe));
    if (at == end) continue;
    ++comparison.compared;
    while (at != end && !same_bits(probe, *at->second)) ++at;
    if (at != end || !comparison.first_difference.empty()) continue;
    comparison.first_difference =
        fmt::format("{} {}", stage_name(static_cast<Stage>(probe.stage())), printable(probe.tensor()));
    if (probe.micro_batch() >= 0)
      comparison.first_difference += fmt::format(" of micro-batch {}", probe.micro_batch());
  }
  return comparison;
}

}  // namespace holdfast
