#include "attempt_log.h"

#include <algorithm>

namespace holdfast {
namespace {

// Long enough for any message worth reading; short enough that thousands of ranks may send one.
constexpr std::size_t kMaxTextBytes = 1024;

// What is found in a reduced gradient, or in the update made from it, was made by no rank of its own.
bool is_same_on_every_rank(Stage stage) { return stage == Stage::kReduction || stage == Stage::kOptimizer; }

std::string clip(std::string_view text) { return std::string(text.substr(0, kMaxTextBytes)); }

// Of the replicas that differ, as much as a report may hold.
constexpr std::size_t kMostDigests = 4096;  // 32 KiB a rank
constexpr std::size_t kMostNameBytes = 128 << 10;

std::vector<std::string> clip(const std::vector<std::string>& names) {
  std::vector<std::string> some;
  std::size_t bytes = 0;
  for (const std::string& name : names) {
    some.push_back(clip(std::string_view(name)));
    bytes += some.back().size();
    if (bytes > kMostNameBytes || some.size() == kMostDigests) break;
  }
  return some;
}

}  // namespace

AttemptLog::AttemptLog(int rank, std::string host) {
  view_.rank = rank;
  view_.host = std::move(host);
}

void AttemptLog::clear() {
  record_ = Record();
  view_.findings.clear();
  view_.error.reset();
  view_.has_loss = false;
  view_.facts.clear();
  view_.fired_rule.clear();
  view_.replica_digests.clear();
  loss_sum_ = 0.0L;
  losses_ = 0;
  micro_batch_ = 0;
  for (StageTally& tally : tallies_) {
    tally.tensors = tally.elements = 0;
    tally.bad = BadCounts();
    tally.abs_max = 0;
    tally.dtype.reset();
  }
}

// Names are written over those of the attempt before, so that a clean attempt allocates nothing.
void AttemptLog::count(Stage stage, std::string_view tensor, const Probe& probe, DType dtype) {
  StageTally& tally = tallies_[static_cast<std::size_t>(stage)];
  if (tally.tensors < tally.names.size()) {
    tally.names[tally.tensors].assign(tensor);
  } else if (tally.names.size() < StageTally::kMostNames) {
    tally.names.emplace_back(tensor);
  }
  ++tally.tensors;
  tally.elements += probe.count;
  tally.bad += probe.bad;
  tally.abs_max = std::max(tally.abs_max, probe.abs_max);
  if (tally.dtype == dtype) return;
  if (!tally.dtype || dtype_largest(dtype) > dtype_largest(*tally.dtype)) tally.dtype = dtype;
}

void AttemptLog::add(Stage stage, std::string_view tensor, const Probe& probe, std::int64_t offset,
                     DType dtype) {
  count(stage, tensor, probe, dtype);
  if (probe.finite()) return;
  record_.add_bad(stage, probe.bad);
  // Later stages are full of what an earlier one started; each stage keeps its own first tensors.
  const auto of_this_stage = std::count_if(view_.findings.begin(), view_.findings.end(),
                                           [&](const Finding& f) { return f.stage == stage; });
  if (static_cast<std::size_t>(of_this_stage) >= kMaxFindingsPerRank) return;
  view_.findings.push_back(
      {stage, clip(tensor), static_cast<std::uint64_t>(offset + probe.first_bad), probe.bad, micro_batch_});
}

void AttemptLog::add_loss(double loss) {
  // Not a running mean: the difference of two infinities would be NaN.
  loss_sum_ += loss;
  view_.loss = static_cast<double>(loss_sum_ / ++losses_);
  view_.has_loss = true;
}

void AttemptLog::set_error(Stage stage, std::string_view what) {
  if (!view_.error) view_.error = {stage, clip(what)};
}

void AttemptLog::set_failed_update(std::string_view what) {
  if (!failed_update_) failed_update_ = {Stage::kOptimizer, clip(what)};
}

void AttemptLog::add_written(std::string_view tensor, const Probe& probe, std::int64_t offset) {
  if (probe.finite()) return;
  written_counts_ += probe.bad;
  if (written_.size() >= kMaxFindingsPerRank) return;
  written_.push_back(
      {Stage::kOptimizer, clip(tensor), static_cast<std::uint64_t>(offset + probe.first_bad), probe.bad, -1});
}

void AttemptLog::go_back() {
  failed_update_.reset();
  written_.clear();
  written_counts_ = BadCounts();
  no_next_batch_ = false;  // there are attempts to make again
}

void AttemptLog::prove(std::uint64_t lane, const std::vector<std::uint64_t>& digests) {
  record_.set_replica_proof(lane);
  view_.replica_digests.assign(
      digests.begin(), digests.begin() + static_cast<std::ptrdiff_t>(std::min(digests.size(), kMostDigests)));
}

void AttemptLog::annotate(std::string_view name, std::int64_t value) {
  constexpr std::size_t kMostFacts = 32;
  if (view_.facts.size() < kMostFacts) view_.facts.push_back({clip(name), value});
}

void AttemptLog::fire_rule(std::string_view what) {
  record_.set_request(Request::kRuleFired);
  if (view_.fired_rule.empty()) view_.fired_rule = clip(what);
}

bool AttemptLog::bad_of_its_own_making() const {
  return has_error() || failed_update_ || !written_.empty() ||
         std::any_of(view_.findings.begin(), view_.findings.end(),
                     [](const Finding& f) { return !is_same_on_every_rank(f.stage); });
}

Record AttemptLog::record(std::uint64_t agreement_lane) const {
  Record record = record_;
  if (has_error()) record.set_error();
  if (no_next_batch_) record.set_no_next_batch();
  if (stop_requested_) record.set_request(Request::kStop);
  if (failed_update_) record.set_error();
  if (failed_update_ || !written_.empty()) {
    record.set_update_failed();
    record.add_bad(Stage::kOptimizer, written_counts_);
  }
  if (bad_of_its_own_making()) record.mark_bad(view_.rank);
  record.set_participant(agreement_lane);
  return record;
}

std::string AttemptLog::report(const Verdict& verdict, const std::vector<std::string>& names) const {
  RankView view = view_;
  if (verdict.kind != Verdict::Kind::kDiverged) view.replica_digests.clear();
  view.proven_tensors = clip(names);
  if (verdict.kind == Verdict::Kind::kUpdateFailed) {
    view.findings = written_;
    view.error = failed_update_;
  } else {
    std::erase_if(view.findings, [&](const Finding& f) { return f.stage != verdict.earliest_stage; });
  }
  const bool from_all = verdict.kind == Verdict::Kind::kDisagree || verdict.kind == Verdict::Kind::kDiverged;
  const bool wanted = from_all || !view.findings.empty() || view.error ||
                      (verdict.kind == Verdict::Kind::kRequested && !view.fired_rule.empty());
  return wanted ? encode_rank_view(view) : std::string();
}

}  // namespace holdfast
