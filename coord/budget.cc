#include "holdfast/coord/budget.h"

#include "holdfast/coord/policy.pb.h"

namespace holdfast {

void SkipBudget::count_skip() {
  ++total_;
  ++consecutive_;
}

bool SkipBudget::allows_another(const Policy& policy) const {
  return total_ < policy.max_total_skips() && consecutive_ < policy.max_consecutive_skips();
}

}  // namespace holdfast
