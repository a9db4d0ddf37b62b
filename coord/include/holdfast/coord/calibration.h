// Skips that loss scaling is expected to make, kept apart from those that the budget is for.
#pragma once

#include <cstdint>
#include <deque>

namespace holdfast {

class Policy;

// A streak of overflow skips stays pending until it is known what it was: calibration when it ends in an
// applied update, charged to the budget whole when it does not.
class Calibration {
 public:
  void count_pending(std::uint64_t attempt);

  // Ends the streak and gives the number of skips in it.
  std::uint64_t settle_as_calibration();
  std::uint64_t settle_as_charged();

  // All of it, for the run's memory.
  struct State {
    std::uint64_t pending = 0;
    std::uint64_t total = 0;
    std::deque<std::uint64_t> attempts;
  };
  State state() const { return {pending_, total_, attempts_}; }
  void restore(State state);

  std::uint64_t pending() const { return pending_; }
  std::uint64_t total() const { return total_; }  // settled as calibration

  // Calibration skips, pending ones included, in the last `window` attempts up to `attempt`.
  std::uint64_t in_window(std::uint64_t attempt, std::uint64_t window);

 private:
  std::uint64_t pending_ = 0;
  std::uint64_t total_ = 0;
  std::deque<std::uint64_t> attempts_;  // of the skips, oldest first
};

}  // namespace holdfast
