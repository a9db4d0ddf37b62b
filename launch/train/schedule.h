// The learning rate of an update.
#pragma once

#include <cstdint>

namespace holdfast::train {

// Driven by the update counter, not by the attempt: a skipped attempt does not move the schedule.
struct Schedule {
  enum class Decay { kNone, kCosine, kExponential };

  double peak = 0.05;
  std::uint64_t warmup_updates = 0;  // linear from peak / warmup_updates
  Decay decay = Decay::kNone;        // from the end of the warm-up on
  std::uint64_t total_updates = 1;   // where a cosine ends, at 0
  double decay_rate = 0.999;         // factor an update, exponential only

  // The rate for the update with this number, counted from 0.
  double rate(std::uint64_t update) const;
};

}  // namespace holdfast::train
