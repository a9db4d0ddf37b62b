#include "stall_clock.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace holdfast {

void StallClock::tick(std::uint64_t beats, std::uint64_t attempt, bool paused) {
  stalled_ = beats != beats_ || paused ? 0 : stalled_ + 1;
  beats_ = beats;
  if (!paused) ++ticks_in_attempt_;  // a pause says nothing about how long an attempt takes
  if (attempt == attempt_) return;
  if (attempt > attempt_ && ticks_in_attempt_ > 0) {
    attempt_ticks_.push_back(static_cast<double>(ticks_in_attempt_) /
                             static_cast<double>(attempt - attempt_));
    if (attempt_ticks_.size() > kWindow) attempt_ticks_.pop_front();
  }
  attempt_ = attempt;
  ticks_in_attempt_ = 0;
}

std::int64_t StallClock::deadline() const {
  if (fixed_ > 0) return fixed_;
  const std::int64_t floor = std::max<std::int64_t>(1, floor_);
  if (attempt_ticks_.size() < kEnoughAttempts) return kStartFactor * floor;
  std::vector<double> sorted(attempt_ticks_.begin(), attempt_ticks_.end());
  const auto middle = sorted.begin() + static_cast<std::ptrdiff_t>(sorted.size() / 2);
  std::nth_element(sorted.begin(), middle, sorted.end());
  return std::max(floor, static_cast<std::int64_t>(std::ceil(kMedianFactor * *middle)));
}

}  // namespace holdfast
