#include "holdfast/coord/budget.h"

#include "holdfast/coord/policy.pb.h"

namespace holdfast {

void SkipBudget::charge(std::uint64_t skips) {
  total_ += skips;
  consecutive_ += skips;
}

bool SkipBudget::allows_another(const Policy& policy) const {
  return total_ < policy.max_total_skips() && consecutive_ < policy.max_consecutive_skips();
}

}  // namespace holdfast
