#include "holdfast/spike_detector.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace holdfast {
namespace {

double median(const std::vector<double>& sorted) { return sorted[sorted.size() / 2]; }

// The median of the distances from the median. They grow to both sides of it: the nearest half is gone
// through.
double median_distance(const std::vector<double>& sorted) {
  const double center = median(sorted);
  const std::size_t nearer = sorted.size() / 2;
  std::size_t begin = nearer;
  std::size_t end = nearer;
  double distance = 0;
  while (end - begin <= nearer) {
    const bool below =
        end == sorted.size() || (begin > 0 && center - sorted[begin - 1] < sorted[end] - center);
    distance = below ? center - sorted[--begin] : sorted[end++] - center;
  }
  return distance;
}

}  // namespace

double SpikeDetector::threshold() const {
  if (logs_.empty() || logs_.size() < options_.least_values) return std::numeric_limits<double>::infinity();
  // 1.4826 makes the median absolute deviation of a normal distribution its sigma. The floor keeps a window
  // of equal values from calling the next rounding error a spike.
  constexpr double kLeastSigma = 0.02;
  const double sigma = std::max(1.4826 * median_distance(sorted_), kLeastSigma);
  return std::exp(median(sorted_) + options_.deviations * sigma);
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
  const double log = std::log(value);
  logs_.push_back(log);
  sorted_.insert(std::ranges::upper_bound(sorted_, log), log);
  if (logs_.size() > options_.window) forget_oldest();
}

void SpikeDetector::forget_oldest() {
  sorted_.erase(std::ranges::lower_bound(sorted_, logs_.front()));
  logs_.pop_front();
}

bool SpikeDetector::add(double value, double* passed) {
  const bool spike = is_spike(value, passed);
  remember(value);
  return spike;
}

void SpikeDetector::restore(std::deque<double> logs) {
  logs_ = std::move(logs);
  std::erase_if(logs_, [](double log) { return !std::isfinite(log); });
  sorted_.assign(logs_.begin(), logs_.end());
  std::ranges::sort(sorted_);
  while (logs_.size() > options_.window) forget_oldest();  // the policy has a shorter one now
}

}  // namespace holdfast
