// The loss scale of 16-bit training, decided from the verdict and so the same on every rank.
#pragma once

#include <cstdint>

#include "holdfast/collectives/status.h"

namespace holdfast {

// Everything is a power of two, so that scaling and unscaling are exact. Defaults and their reasons: Policy.
struct LossScaleOptions {
  double initial = 65536.0;
  double largest = 16777216.0;  // 2^24
  double smallest = 1.0;
  std::uint64_t growth_interval = 2000;  // clean updates between two doublings
  std::uint64_t hysteresis = 1;          // overflows since the last growth or halving that halve once
};

class LossScaler {
 public:
  // What has to be saved for a resumed run to go on the same.
  struct State {
    double scale = 1.0;
    std::uint64_t clean_updates = 0;       // since the scale last changed
    std::uint64_t overflows_to_halve = 1;  // left of the hysteresis

    bool operator==(const State&) const = default;
  };

  explicit LossScaler(const LossScaleOptions& options);

  double scale() const { return state_.scale; }
  const State& state() const { return state_; }

  const LossScaleOptions& options() const { return options_; }

  // Goes on where `state` was saved. USAGE, and nothing is changed, for what this scaler could not have come
  // to: a scale that is no power of two within [smallest, largest], or counters beyond their interval.
  Status restore(const State& state);

  // Whether one more overflow finds the scale at its smallest, with nothing left to halve.
  bool exhausted_by_overflow() const;

  void on_clean_update();
  void on_overflow();  // halves, but never below the smallest scale

 private:
  const LossScaleOptions options_;
  State state_;
};

}  // namespace holdfast
