#include "stall_clock.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace holdfast {

void StallClock::tick(std::uint64_t beats, std::uint64_t attempt, bool paused) {
  stalled_ = beats != beats_ || paused ? 0 : stalled_ + 1;
  beats_ = beats;
  if (paused) {
    ticks_in_attempt_ = 0;  // what was paused says nothing about how long an attempt takes
    attempt_ = attempt;
    return;
  }
  ++ticks_in_attempt_;
  if (attempt == attempt_) return;
  if (attempt > attempt_) {
    attempt_ticks_.push_back(static_cast<double>(ticks_in_attempt_) / static_cast<double>(attempt - attempt_));
    if (attempt_ticks_.size() > kWindow) attempt_ticks_.pop_front();
  }
  attempt_ = attempt;
  ticks_in_attempt_ = 0;
}

std::int64_t StallClock::deadline() const {
  if (fixed_ > 0) return fixed_;
  if (attempt_ticks_.size() < kEnoughAttempts) return kStartFactor * floor_;
  std::vector<double> sorted(attempt_ticks_.begin(), attempt_ticks_.end());
  const auto middle = sorted.begin() + static_cast<std::ptrdiff_t>(sorted.size() / 2);
  std::nth_element(sorted.begin(), middle, sorted.end());
  return std::max(floor_, static_cast<std::int64_t>(std::ceil(kMedianFactor * *middle)));
}

}  // namespace holdfast
