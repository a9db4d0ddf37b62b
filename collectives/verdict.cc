#include "holdfast/collectives/verdict.h"

namespace holdfast {
namespace {

std::optional<Stage> earliest_bad_stage(const Record& sum) {
  for (int s = 0; s < kStageCount; ++s) {
    const BadCounts counts = sum.bad(static_cast<Stage>(s));
    // Not total(): three large lanes could wrap to zero.
    if (counts.nan != 0 || counts.pos_inf != 0 || counts.neg_inf != 0) return static_cast<Stage>(s);
  }
  return std::nullopt;
}

bool any_request(const Record& sum) {
  for (int r = 0; r < kRequestCount; ++r) {
    if (sum.requests(static_cast<Request>(r)) != 0) return true;
  }
  return false;
}

Verdict::Kind worst(const Verdict& verdict, int world_size) {
  const Record& sum = verdict.sum;
  if (sum.participants() != static_cast<std::uint64_t>(world_size)) return Verdict::Kind::kMissing;
  if (sum.agreement() != 0 || !sum.reserved_is_zero()) return Verdict::Kind::kDisagree;
  if (sum.parts_done() > sum.participants()) return Verdict::Kind::kDisagree;
  if (sum.updates_failed() != 0) return Verdict::Kind::kUpdateFailed;
  if (sum.replica_proof() != 0) return Verdict::Kind::kDiverged;
  if (sum.errors() != 0) return Verdict::Kind::kError;
  if (verdict.earliest_stage || sum.bad_ranks() != 0) return Verdict::Kind::kNonFinite;
  if (any_request(sum)) return Verdict::Kind::kRequested;
  return Verdict::Kind::kClean;
}

}  // namespace

Verdict judge(const Record& sum, int world_size) {
  Verdict verdict{.sum = sum};  // zeros first would be half of the time
  verdict.earliest_stage = earliest_bad_stage(sum);
  if (sum.bad_ranks() == 1 && sum.bad_rank_sum() < static_cast<std::uint64_t>(world_size)) {
    verdict.only_bad_rank = static_cast<int>(sum.bad_rank_sum());
  }
  verdict.parts_done = sum.parts_done() == static_cast<std::uint64_t>(world_size);
  verdict.last_attempt_with_data = sum.no_next_batch() != 0;
  verdict.kind = worst(verdict, world_size);
  return verdict;
}

}  // namespace holdfast
