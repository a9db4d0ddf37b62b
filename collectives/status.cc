#include "holdfast/collectives/status.h"

namespace holdfast {

std::string_view status_code_name(StatusCode code) {
  switch (code) {
    case StatusCode::kOk: return "OK";
    case StatusCode::kUsage: return "USAGE";
    case StatusCode::kInternal: return "INTERNAL";
    case StatusCode::kBudgetExhausted: return "BUDGET_EXHAUSTED";
    case StatusCode::kLossScaleExhausted: return "LOSS_SCALE_EXHAUSTED";
    case StatusCode::kRanksDisagree: return "RANKS_DISAGREE";
    case StatusCode::kRankMissing: return "RANK_MISSING";
    case StatusCode::kNoCleanGeneration: return "NO_CLEAN_GENERATION";
    case StatusCode::kStoppedByOperator: return "STOPPED_BY_OPERATOR";
    case StatusCode::kRestartNotAcknowledged: return "RESTART_NOT_ACKNOWLEDGED";
  }
  return "UNKNOWN";
}

std::string Status::to_string() const {
  if (ok()) return "OK";
  return std::string(status_code_name(code_)) + " (" + std::to_string(exit_code()) + "): " + message_;
}

}  // namespace holdfast
