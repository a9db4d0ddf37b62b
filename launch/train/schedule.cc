#include "train/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace holdfast::train {

double Schedule::rate(std::uint64_t update) const {
  if (update < warmup_updates) {
    return peak * static_cast<double>(update + 1) / static_cast<double>(warmup_updates);
  }
  const double after = static_cast<double>(update - warmup_updates);
  switch (decay) {
    case Decay::kNone: return peak;
    case Decay::kExponential: return peak * std::pow(decay_rate, after);
    case Decay::kCosine: {
      const std::uint64_t span = total_updates > warmup_updates ? total_updates - warmup_updates : 1;
      const double progress = std::min(1.0, after / static_cast<double>(span));
      return peak * 0.5 * (1.0 + std::cos(std::numbers::pi * progress));
    }
  }
  return peak;
}

}  // namespace holdfast::train
