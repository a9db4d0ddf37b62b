#include "holdfast/coord/calibration.h"

#include <utility>

namespace holdfast {

void Calibration::count_overflow(std::uint64_t attempt) {
  ++overflows_;
  attempts_.push_back(attempt);
}

Calibration::Settled Calibration::settle_by_update() {
  total_ += overflows_;
  return {std::exchange(overflows_, 0), std::exchange(defects_, 0)};
}

std::uint64_t Calibration::settle_as_charged() {
  for (std::uint64_t i = 0; i < overflows_ && !attempts_.empty(); ++i) attempts_.pop_back();
  return std::exchange(overflows_, 0) + std::exchange(defects_, 0);
}

void Calibration::restore(State state) {
  overflows_ = state.overflows;
  defects_ = state.defects;
  total_ = state.total;
  attempts_ = std::move(state.attempts);
}

std::uint64_t Calibration::in_window(std::uint64_t attempt, std::uint64_t window) {
  while (!attempts_.empty() && attempt - attempts_.front() >= window) attempts_.pop_front();
  return attempts_.size();
}

}  // namespace holdfast
