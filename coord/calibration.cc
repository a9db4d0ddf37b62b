#include "holdfast/coord/calibration.h"

#include <utility>

namespace holdfast {

void Calibration::count_pending(std::uint64_t attempt) {
  ++pending_;
  attempts_.push_back(attempt);
}

std::uint64_t Calibration::settle_as_calibration() {
  total_ += pending_;
  return std::exchange(pending_, 0);
}

std::uint64_t Calibration::settle_as_charged() {
  for (std::uint64_t i = 0; i < pending_ && !attempts_.empty(); ++i) attempts_.pop_back();
  return std::exchange(pending_, 0);
}

void Calibration::restore(State state) {
  pending_ = state.pending;
  total_ = state.total;
  attempts_ = std::move(state.attempts);
}

std::uint64_t Calibration::in_window(std::uint64_t attempt, std::uint64_t window) {
  while (!attempts_.empty() && attempt - attempts_.front() >= window) attempts_.pop_front();
  return attempts_.size();
}

}  // namespace holdfast
