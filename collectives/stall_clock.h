// How long an attempt has stood still, in ticks of the watchdog.
#pragma once

#include <cstdint>
#include <deque>

#include "holdfast/collectives/progress_board.h"

namespace holdfast {

// Counts ticks, not wall-clock time: a machine that was suspended for an hour has seen one tick.
class StallClock {
 public:
  // Stalled for `fixed_deadline` ticks is overdue; 0 derives the deadline from the attempts seen so far:
  // kMedianFactor times the median attempt, never under `floor` ticks; until kEnoughAttempts were seen,
  // kStartFactor times the floor, since first attempts build kernels and fill caches.
  StallClock(std::int64_t fixed_deadline, std::int64_t floor) : fixed_(fixed_deadline), floor_(floor) {}

  static constexpr std::int64_t kMedianFactor = 20;
  static constexpr std::int64_t kStartFactor = 5;
  static constexpr std::size_t kEnoughAttempts = 8;

  // Once a tick.
  void tick(std::uint64_t beats, std::uint64_t attempt, bool paused);

  std::int64_t stalled() const { return stalled_; }  // ticks since the last progress
  std::int64_t deadline() const;                     // ticks
  bool overdue() const { return stalled_ >= deadline(); }

 private:
  static constexpr std::size_t kWindow = 101;  // samples in the median

  const std::int64_t fixed_;
  const std::int64_t floor_;
  std::uint64_t beats_ = 0;
  std::uint64_t attempt_ = 0;
  std::int64_t stalled_ = 0;
  std::int64_t ticks_in_attempt_ = 0;
  std::deque<double> attempt_ticks_;  // durations, in ticks; under one tick as a fraction
};

}  // namespace holdfast
