#include "holdfast/coord/decide.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <vector>

#include "holdfast/coord/policy.pb.h"

namespace holdfast {
namespace {

Decision abort_run(StatusCode code, std::string reason) { return {Action::kAbort, code, std::move(reason)}; }

// Ranks that claim the same agreement.
struct Camp {
  Agreement claim;
  std::vector<int> ranks;
};

std::string describe(const Camp& camp) {
  constexpr std::size_t kMostNamed = 16;
  const std::size_t named = std::min(camp.ranks.size(), kMostNamed);
  std::string more = camp.ranks.size() > named ? fmt::format(" and {} more", camp.ranks.size() - named) : "";
  return fmt::format(
      "rank {}{} at epoch {}, attempt {}, policy {:x}",
      fmt::join(camp.ranks.begin(), camp.ranks.begin() + static_cast<std::ptrdiff_t>(named), ","), more,
      camp.claim.epoch, camp.claim.attempt, camp.claim.policy_hash);
}

// The smaller camps by name, and the largest by number; all by name when none is the largest.
std::string describe_disagreement(const Incident& incident) {
  std::vector<Camp> camps;
  for (const RankView& view : incident.views) {
    const auto found =
        std::ranges::find_if(camps, [&](const Camp& camp) { return camp.claim == view.agreement; });
    (found == camps.end() ? camps.emplace_back(Camp{view.agreement, {}}) : *found).ranks.push_back(view.rank);
  }
  std::ranges::stable_sort(camps, {}, [](const Camp& camp) { return camp.ranks.size(); });
  const bool majority = camps.size() > 1 && camps.back().ranks.size() > camps[camps.size() - 2].ranks.size();
  std::string text;
  for (std::size_t i = 0; i < camps.size(); ++i) {
    if (i > 0) text += "; ";
    if (majority && i + 1 == camps.size()) text += fmt::format("the other {}: ", camps[i].ranks.size());
    text += describe(camps[i]);
  }
  return text;
}

Decision budget_spent(const Policy& policy, const SkipBudget& budget, const Incident& incident) {
  return abort_run(StatusCode::kBudgetExhausted,
                   fmt::format("skip budget spent ({} of {} in total, {} of {} in a row): {}", budget.total(),
                               policy.max_total_skips(), budget.consecutive(), policy.max_consecutive_skips(),
                               incident.describe()));
}

Decision skip_within_budget(const Policy& policy, const SkipBudget& budget, const Incident& incident) {
  if (budget.allows_another(policy)) return {Action::kSkip, StatusCode::kOk, incident.describe()};
  return budget_spent(policy, budget, incident);
}

// Gradients with a NaN and no infinity, at a scale that can be halved. It will be charged whatever ends the
// streak, so the total must have room for it now, and no run goes on past its total. The row is not counted
// yet: the scale may descend to its floor first.
Decision skip_pending_defect(const Policy& policy, SkipBudget budget, const Incident& incident,
                             std::uint64_t pending_defects) {
  budget.charge(pending_defects);
  if (budget.total() >= policy.max_total_skips()) return budget_spent(policy, budget, incident);
  return {Action::kSkip, StatusCode::kOk,
          fmt::format("NaN without an infinity at loss scale {}: {}", incident.loss_scale->scale,
                      incident.describe())};
}

// Only an earlier state cures it.
Decision on_spoilt_state(const Policy& policy, const std::string& what, bool can_roll_back) {
  const std::string cure = what + ": the state has to be rolled back";
  if (!can_roll_back) {
    return abort_run(StatusCode::kNoCleanGeneration, cure + ", and there is no checkpoint to roll back to");
  }
  if (policy.on_spoilt_state() == Policy::GO_BACK) return {Action::kRollBack, StatusCode::kOk, what};
  return abort_run(StatusCode::kNoCleanGeneration, cure + " (on_spoilt_state: END_RUN)");
}

Decision on_diverged(const Policy& policy, std::string what, bool can_roll_back) {
  if (can_roll_back && policy.on_divergence() == Policy::GO_BACK) {
    return {Action::kRollBack, StatusCode::kOk, std::move(what)};
  }
  return abort_run(StatusCode::kRanksDisagree, std::move(what));
}

Decision on_non_finite(const Policy& policy, const SkipBudget& budget, const Incident& incident,
                       std::uint64_t pending_defects = 0) {
  if (incident.loss_scale && incident.loss_scale->exhausted && incident.verdict.gradient_overflow()) {
    return abort_run(StatusCode::kLossScaleExhausted,
                     fmt::format("loss scale exhausted: still non-finite at the smallest scale, {}: {}",
                                 incident.loss_scale->scale, incident.describe()));
  }
  if (is_calibration(policy, incident)) {
    return {Action::kSkip, StatusCode::kOk,
            fmt::format("overflow at loss scale {}: {}", incident.loss_scale->scale, incident.describe())};
  }
  // The run ends at the first, so whenever there is one it is the first.
  if (policy.on_first() == Policy::ABORT) {
    return abort_run(StatusCode::kBudgetExhausted, incident.describe() + " (on_first: ABORT)");
  }
  if (is_pending(incident)) return skip_pending_defect(policy, budget, incident, pending_defects);
  return skip_within_budget(policy, budget, incident);
}

Decision on_error(const Policy& policy, const SkipBudget& budget, const Incident& incident) {
  if (policy.on_error() == Policy::ABORT) {
    return abort_run(StatusCode::kInternal, incident.describe_error() + " (on_error: ABORT)");
  }
  // A trainer that throws because it met a NaN does not get around the rules for one.
  if (incident.verdict.earliest_stage) return on_non_finite(policy, budget, incident);
  return skip_within_budget(policy, budget, incident);
}

Decision on_failed_update(const Policy& policy, const Incident& incident, bool can_roll_back) {
  // Of this verdict the reports tell of failed updates only; the error lane counts exceptions of this attempt, too.
  const bool threw = incident.first_error() != nullptr;
  const bool on_all = incident.verdict.sum.updates_failed() == incident.verdict.sum.participants();
  // Where every replica wrote the same they still agree; but what they agree on is spoilt. On some of them,
  // it is spoilt too, when there is something to go back to.
  if (!threw && (on_all || can_roll_back) && !incident.origins().empty()) {
    return on_spoilt_state(policy, "after an update there is " + incident.describe(), can_roll_back);
  }
  return on_diverged(policy,
                     fmt::format("the last update failed on {} of the ranks, so replicas may differ: {}",
                                 incident.verdict.sum.updates_failed(),
                                 threw ? incident.describe_error() : incident.describe()),
                     can_roll_back);
}

Decision on_request(const Policy& policy, const SkipBudget& budget, const Incident& incident) {
  const Record& sum = incident.verdict.sum;
  if (sum.requests(Request::kStop) != 0) {
    return {Action::kStop, StatusCode::kStoppedByOperator, "an orderly stop was asked for"};
  }
  if (sum.requests(Request::kRuleFired) != 0) return skip_within_budget(policy, budget, incident);
  return abort_run(StatusCode::kInternal, "a rank made a request that this version cannot carry out");
}

}  // namespace

bool is_pending(const Incident& incident) {
  return incident.loss_scale && !incident.loss_scale->exhausted && incident.verdict.gradient_overflow();
}

bool is_calibration(const Policy& policy, const Incident& incident) {
  if (!is_pending(incident)) return false;
  const BadCounts counts = incident.verdict.sum.bad(*incident.verdict.earliest_stage);
  return counts.pos_inf != 0 || counts.neg_inf != 0 || policy.loss_scale().nan_is_calibration();
}

Decision decide(const Policy& policy, const SkipBudget& budget, const Incident& incident,
                std::uint64_t pending_defects, bool can_roll_back) {
  switch (incident.verdict.kind) {
    case Verdict::Kind::kMissing:
      return abort_run(StatusCode::kRankMissing,
                       fmt::format("{} ranks took part in the attempt", incident.verdict.sum.participants()));
    case Verdict::Kind::kDisagree:
      return abort_run(StatusCode::kRanksDisagree,
                       fmt::format("ranks disagree: {}", describe_disagreement(incident)));
    case Verdict::Kind::kUpdateFailed: return on_failed_update(policy, incident, can_roll_back);
    case Verdict::Kind::kDiverged: return on_diverged(policy, incident.describe_divergence(), can_roll_back);
    case Verdict::Kind::kError: return on_error(policy, budget, incident);
    case Verdict::Kind::kNonFinite:
      if (incident.closing) {
        return on_spoilt_state(policy, "after the last attempt there is " + incident.describe(),
                               can_roll_back);
      }
      return on_non_finite(policy, budget, incident, pending_defects);
    case Verdict::Kind::kRequested: return on_request(policy, budget, incident);
    case Verdict::Kind::kClean: break;
  }
  return abort_run(StatusCode::kInternal, "asked to decide on a clean attempt");
}

}  // namespace holdfast
