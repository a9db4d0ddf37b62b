#include "holdfast/coord/decide.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <map>
#include <tuple>
#include <vector>

#include "holdfast/coord/policy.pb.h"

namespace holdfast {
namespace {

Decision abort_run(StatusCode code, std::string reason) { return {Action::kAbort, code, std::move(reason)}; }

// "rank 0,1,3 at epoch 1, attempt 5, policy 9f01; rank 2 at ..."
std::string describe_disagreement(const Incident& incident) {
  std::map<std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>, std::vector<int>> groups;
  for (const RankView& view : incident.views) {
    groups[{view.agreement.epoch, view.agreement.attempt, view.agreement.policy_hash}].push_back(view.rank);
  }
  std::string text;
  for (const auto& [key, ranks] : groups) {
    const auto& [epoch, attempt, policy] = key;
    text += fmt::format("{}rank {} at epoch {}, attempt {}, policy {:x}", text.empty() ? "" : "; ",
                        fmt::join(ranks, ","), epoch, attempt, policy);
  }
  return text;
}

Decision skip_within_budget(const Policy& policy, const SkipBudget& budget, const Incident& incident) {
  if (budget.allows_another(policy)) return {Action::kSkip, StatusCode::kOk, incident.describe()};
  return abort_run(StatusCode::kBudgetExhausted,
                   fmt::format("skip budget spent ({} of {} in total, {} of {} in a row): {}", budget.total(),
                               policy.max_total_skips(), budget.consecutive(), policy.max_consecutive_skips(),
                               incident.describe()));
}

Decision on_error(const Policy& policy, const SkipBudget& budget, const Incident& incident) {
  if (policy.on_error() == Policy::ABORT) {
    return abort_run(StatusCode::kInternal, incident.describe() + " (on_error: ABORT)");
  }
  return skip_within_budget(policy, budget, incident);
}

Decision on_non_finite(const Policy& policy, const SkipBudget& budget, const Incident& incident) {
  if (policy.on_first() == Policy::ABORT && budget.total() == 0) {
    return abort_run(StatusCode::kBudgetExhausted, incident.describe() + " (on_first: ABORT)");
  }
  return skip_within_budget(policy, budget, incident);
}

Decision on_request(const Incident& incident) {
  const Record& sum = incident.verdict.sum;
  if (sum.requests(Request::kStop) != 0) {
    return {Action::kStop, StatusCode::kStoppedByOperator, "an orderly stop was asked for"};
  }
  return abort_run(StatusCode::kInternal, "a rank made a request that this version cannot carry out");
}

}  // namespace

Decision decide(const Policy& policy, const SkipBudget& budget, const Incident& incident) {
  switch (incident.verdict.kind) {
    case Verdict::Kind::kMissing:
      return abort_run(StatusCode::kRankMissing,
                       fmt::format("{} ranks took part in the attempt", incident.verdict.sum.participants()));
    case Verdict::Kind::kDisagree:
      return abort_run(StatusCode::kRanksDisagree, fmt::format("ranks disagree: {}", describe_disagreement(incident)));
    case Verdict::Kind::kUpdateFailed:
      return abort_run(StatusCode::kRanksDisagree,
                       fmt::format("the last update failed on {} of the ranks, so replicas may differ: {}",
                                   incident.verdict.sum.updates_failed(), incident.describe()));
    case Verdict::Kind::kError: return on_error(policy, budget, incident);
    case Verdict::Kind::kNonFinite: return on_non_finite(policy, budget, incident);
    case Verdict::Kind::kRequested: return on_request(incident);
    case Verdict::Kind::kClean: break;
  }
  return abort_run(StatusCode::kInternal, "asked to decide on a clean attempt");
}

}  // namespace holdfast
