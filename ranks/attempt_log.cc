#include "attempt_log.h"

#include <algorithm>

namespace holdfast {
namespace {

// Long enough for any message worth reading; short enough that thousands of ranks may send one.
constexpr std::size_t kMaxTextBytes = 1024;

std::string clip(std::string_view text) { return std::string(text.substr(0, kMaxTextBytes)); }

}  // namespace

AttemptLog::AttemptLog(int rank, std::string host) {
  view_.rank = rank;
  view_.host = std::move(host);
}

void AttemptLog::clear(const Agreement& agreement) {
  record_ = Record();
  view_.findings.clear();
  view_.error.reset();
  view_.loss = 0.0;
  view_.has_loss = false;
  losses_ = 0;
  view_.agreement = agreement;
  micro_batch_ = 0;
}

void AttemptLog::add(Stage stage, std::string_view tensor, const Probe& probe, std::int64_t offset) {
  if (probe.finite()) return;
  record_.add_bad(stage, probe.bad);
  // Later stages are full of what an earlier one started; each stage keeps its own first tensors.
  const auto of_this_stage = std::count_if(view_.findings.begin(), view_.findings.end(),
                                           [&](const Finding& f) { return f.stage == stage; });
  if (static_cast<std::size_t>(of_this_stage) >= kMaxFindingsPerRank) return;
  view_.findings.push_back({stage, clip(tensor), static_cast<std::uint64_t>(offset + probe.first_bad), probe.bad,
                            micro_batch_});
}

void AttemptLog::add_loss(double loss) {
  ++losses_;
  view_.loss += (loss - view_.loss) / losses_;
  view_.has_loss = true;
}

void AttemptLog::set_error(Stage stage, std::string_view what) {
  if (!view_.error) view_.error = {stage, clip(what)};
}

void AttemptLog::set_failed_update(std::string_view what) {
  if (!failed_update_) failed_update_ = {Stage::kOptimizer, clip(what)};
}

bool AttemptLog::bad_of_its_own_making() const {
  return has_error() || failed_update_ ||
         std::any_of(view_.findings.begin(), view_.findings.end(),
                     [](const Finding& f) { return f.stage != Stage::kReduction; });
}

Record AttemptLog::record(std::uint64_t agreement_lane) const {
  Record record = record_;
  if (has_error()) record.set_error();
  if (failed_update_) record.set_update_failed();
  if (bad_of_its_own_making()) record.mark_bad(view_.rank);
  record.set_participant(agreement_lane);
  return record;
}

std::string AttemptLog::report(const Verdict& verdict) const {
  const bool saw_the_stage =
      std::any_of(view_.findings.begin(), view_.findings.end(),
                  [&](const Finding& f) { return f.stage == verdict.earliest_stage; });
  const bool wanted = verdict.kind == Verdict::Kind::kDisagree || saw_the_stage || has_error() || failed_update_;
  if (!wanted) return {};
  RankView view = view_;
  if (failed_update_) view.error = failed_update_;
  std::erase_if(view.findings, [&](const Finding& f) { return f.stage != verdict.earliest_stage; });
  return encode_rank_view(view);
}

}  // namespace holdfast
