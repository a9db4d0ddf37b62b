// Skips that loss scaling is expected to make, kept apart from those that the budget is for.
#pragma once

#include <cstdint>
#include <deque>

namespace holdfast {

// A streak of gradient skips stays pending until it is known what it was. When it ends in an applied update,
// its overflows were calibration and its defects, such as NaN alone, are charged to the budget; otherwise it
// is charged whole.
class Calibration {
 public:
  void count_overflow(std::uint64_t attempt);
  void count_defect() { ++defects_; }

  struct Settled {
    std::uint64_t calibration = 0;
    std::uint64_t charged = 0;
  };
  Settled settle_by_update();
  std::uint64_t settle_as_charged();  // gives the number of skips in the streak

  std::uint64_t pending() const { return overflows_ + defects_; }
  std::uint64_t pending_defects() const { return defects_; }

  // All of it, for the run's memory.
  struct State {
    std::uint64_t overflows = 0;
    std::uint64_t defects = 0;
    std::uint64_t total = 0;
    std::deque<std::uint64_t> attempts;
  };
  State state() const { return {overflows_, defects_, total_, attempts_}; }
  void restore(State state);

  std::uint64_t total() const { return total_; }  // settled as calibration

  // Overflow skips, pending ones included, in the last `window` attempts up to `attempt`; charged ones are
  // not.
  std::uint64_t in_window(std::uint64_t attempt, std::uint64_t window);

 private:
  std::uint64_t overflows_ = 0;  // of the running streak, as are the defects
  std::uint64_t defects_ = 0;
  std::uint64_t total_ = 0;
  std::deque<std::uint64_t> attempts_;  // of the overflows, oldest first
};

}  // namespace holdfast
