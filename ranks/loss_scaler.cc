#include "holdfast/loss_scaler.h"

#include <algorithm>

namespace holdfast {

LossScaler::LossScaler(const LossScaleOptions& options)
    : options_(options), state_{options.initial, 0, options.hysteresis} {}

bool LossScaler::exhausted_by_overflow() const {
  return state_.scale <= options_.smallest && state_.overflows_to_halve <= 1;
}

void LossScaler::on_clean_update() {
  if (++state_.clean_updates < options_.growth_interval) return;
  state_ = {std::min(state_.scale * 2.0, options_.largest), 0, options_.hysteresis};
}

void LossScaler::on_overflow() {
  state_.clean_updates = 0;
  if (state_.overflows_to_halve > 1) {
    --state_.overflows_to_halve;
    return;
  }
  state_ = {std::max(state_.scale * 0.5, options_.smallest), 0, options_.hysteresis};
}

}  // namespace holdfast
