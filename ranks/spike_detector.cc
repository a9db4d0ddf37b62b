#include "holdfast/spike_detector.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace holdfast {
namespace {

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace

double SpikeDetector::threshold() const {
  if (logs_.size() < options_.least_values) return std::numeric_limits<double>::infinity();
  const std::vector<double> logs(logs_.begin(), logs_.end());
  const double center = median(logs);
  std::vector<double> distances;
  for (const double log : logs) distances.push_back(std::abs(log - center));
  // 1.4826 makes the median absolute deviation of a normal distribution its sigma. The floor keeps a window
  // of equal values from calling the next rounding error a spike.
  constexpr double kLeastSigma = 0.02;
  const double sigma = std::max(1.4826 * median(std::move(distances)), kLeastSigma);
  return std::exp(center + options_.deviations * sigma);
}

bool SpikeDetector::is_spike(double value, double* passed) const {
  if (!std::isfinite(value) || value <= 0) return false;
  const double limit = threshold();
  const bool spike = value > limit;
  if (spike && passed != nullptr) *passed = limit;
  return spike;
}

void SpikeDetector::remember(double value) {
  if (!std::isfinite(value) || value <= 0) return;
  logs_.push_back(std::log(value));
  if (logs_.size() > options_.window) logs_.pop_front();
}

bool SpikeDetector::add(double value, double* passed) {
  const bool spike = is_spike(value, passed);
  remember(value);
  return spike;
}

void SpikeDetector::restore(std::deque<double> logs) {
  logs_ = std::move(logs);
  while (logs_.size() > options_.window) logs_.pop_front();  // the policy has a shorter one now
}

}  // namespace holdfast
