// How long attempts take.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <string>
#include <vector>

namespace holdfast::train {

class AttemptTimes {
 public:
  void begin() { begin_ = Clock::now(); }
  void end() { seconds_.push_back(std::chrono::duration<double>(Clock::now() - begin_).count()); }

  // "timing attempts=90 median=0.012345 mean=0.012567 s". The first tenth, in which caches fill, is left out.
  std::string describe() const {
    std::vector<double> sorted(seconds_.begin() + static_cast<std::ptrdiff_t>(seconds_.size() / 10),
                               seconds_.end());
    if (sorted.empty()) return "timing attempts=0";
    std::ranges::sort(sorted);
    const double sum = std::accumulate(sorted.begin(), sorted.end(), 0.0);
    return fmt::format("timing attempts={} median={:.6f} mean={:.6f} s", sorted.size(),
                       sorted[sorted.size() / 2], sum / static_cast<double>(sorted.size()));
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point begin_;
  std::vector<double> seconds_;
};

}  // namespace holdfast::train
