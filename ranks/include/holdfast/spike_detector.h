// Values far above what they have been: a gradient norm or a loss that takes off.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

namespace holdfast {

struct SpikeOptions {
  std::size_t window = 200;       // finite values remembered
  std::size_t least_values = 50;  // before that many, nothing is a spike
  double deviations = 12.0;  // from the median, in units of the median absolute deviation scaled to sigma
};

// Robust: the yardstick is the median and the median absolute deviation of the logarithms of the last finite
// values, so that neither NaN nor infinities nor a few huge values move it, and none can blind it for ever.
// A NaN or an infinity is not a spike: it is found, counted and attributed elsewhere.
class SpikeDetector {
 public:
  explicit SpikeDetector(const SpikeOptions& options) : options_(options) {}

  // Whether `value` is a spike against the values remembered. Values that are not finite or not positive are
  // none. `passed`, when given, gets what a spike exceeded.
  bool is_spike(double value, double* passed = nullptr) const;
  // It joins them, unless it is not finite or not positive.
  void remember(double value);
  // Both.
  bool add(double value, double* passed = nullptr);

  // The logarithms of the values remembered, oldest first, for a checkpoint.
  const std::deque<double>& logs() const { return logs_; }
  void restore(std::deque<double> logs);

  double threshold() const;  // what the next value must exceed; +Inf while there are too few

 private:
  void forget_oldest();

  const SpikeOptions options_;
  std::deque<double> logs_;
  std::vector<double> sorted_;  // the same, by size: each attempt wants their median, and only one is new
};

}  // namespace holdfast
