#include "holdfast/loss_scaler.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string>

namespace holdfast {

LossScaler::LossScaler(const LossScaleOptions& options)
    : options_(options), state_{options.initial, 0, options.hysteresis} {}

Status LossScaler::restore(const State& state) {
  const auto refuse = [](const char* field, auto value, const std::string& wanted) {
    return Status::usage(fmt::format("saved loss scale: {} is {}, but must be {}", field, value, wanted));
  };
  int exponent = 0;
  // The mantissa of NaN and of the infinities is no half either.
  const bool power_of_two = std::frexp(state.scale, &exponent) == 0.5;
  if (!power_of_two || state.scale < options_.smallest || state.scale > options_.largest) {
    return refuse("scale", state.scale,
                  fmt::format("a power of two from {} to {}", options_.smallest, options_.largest));
  }
  if (state.clean_updates >= options_.growth_interval) {
    return refuse("clean_updates", state.clean_updates,
                  fmt::format("below the growth interval, {}", options_.growth_interval));
  }
  if (state.overflows_to_halve < 1 || state.overflows_to_halve > options_.hysteresis) {
    return refuse("overflows_to_halve", state.overflows_to_halve,
                  fmt::format("from 1 to the hysteresis, {}", options_.hysteresis));
  }
  state_ = state;
  return Status();
}

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
