// How many of the last attempts were skipped.
#pragma once

#include <cstdint>
#include <deque>

namespace holdfast {

// A sliding window over the attempts of a run. Attempts are numbered by the order in which they were made,
// from 1 and across restarts: never by data position, which a restored run repeats. Not thread-safe.
class RateWindow {
 public:
  // `width` in attempts, at least 1. Remembers at most `most_skips`, the newest; skips() stops there.
  RateWindow(std::uint64_t width, std::size_t most_skips) : width_(width), most_skips_(most_skips) {}

  // Attempt number `attempt` was made. Numbers grow. O(1) when they grow by one; allocates nothing.
  void advance(std::uint64_t attempt);

  // Attempt number `attempt`, which was made, was a skip. It may have been settled late, after newer ones.
  void add_skip(std::uint64_t attempt);

  std::uint64_t skips() const { return skips_.size(); }
  // Attempts in the window: its width, or fewer in a young run.
  std::uint64_t attempts() const { return made_ < width_ ? made_ : width_; }
  // Whether attempt number `attempt` is in it.
  bool holds(std::uint64_t attempt) const { return made_ < width_ || attempt > made_ - width_; }

 private:
  std::uint64_t width_;
  std::size_t most_skips_;
  std::uint64_t made_ = 0;
  std::deque<std::uint64_t> skips_;  // their numbers, oldest first
};

}  // namespace holdfast
