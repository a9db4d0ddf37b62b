// Where the running attempt stands on this rank: written by the training thread, read by the watchdog's.
#pragma once

#include <atomic>
#include <cstdint>
#include <string_view>

namespace holdfast {

enum class Phase : std::uint8_t { kOutside, kBegin, kObserve, kReduce, kDecide, kUpdate };
std::string_view phase_name(Phase phase);  // "outside", "begin", ...

// A place in the run. Ranks that make the same calls are at the same place at the same time; who is behind in
// (epoch, attempt, step) is who the others wait for.
struct Place {
  std::uint64_t epoch = 0;
  std::uint64_t attempt = 0;
  // kMeeting for each point of the attempt that all ranks come to, and the calls to enter() since the last.
  // So ranks that observe more or fewer tensors, such as one that has failed, are at the same place when they
  // wait for others.
  std::uint32_t step = 0;
  Phase phase = Phase::kOutside;

  static constexpr std::uint32_t kMeeting = 1 << 20;

  bool behind(const Place& other) const;
};

// One writer, any readers. A few relaxed stores a call, no system call. A reader may see the fields of two
// neighbouring places mixed while the writer moves; what does not move reads right.
class ProgressBoard {
 public:
  void enter(std::uint64_t epoch, std::uint64_t attempt, Phase phase) {
    const bool same = attempt_.load(std::memory_order_relaxed) == attempt &&
                      epoch_.load(std::memory_order_relaxed) == epoch;
    const std::uint32_t before = step_.load(std::memory_order_relaxed);
    const bool meets = phase != Phase::kObserve;
    const bool full = before % Place::kMeeting == Place::kMeeting - 1;
    const std::uint32_t next = meets  ? (before / Place::kMeeting + 1) * Place::kMeeting
                               : full ? before
                                      : before + 1;
    const std::uint32_t step = same ? next : 0;
    epoch_.store(epoch, std::memory_order_relaxed);
    attempt_.store(attempt, std::memory_order_relaxed);
    step_.store(step, std::memory_order_relaxed);
    phase_.store(phase, std::memory_order_relaxed);
    beats_.store(beats_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }

  // Between the two, standing still means nothing. Calls nest.
  void pause() { pauses_.fetch_add(1, std::memory_order_relaxed); }
  void resume() { pauses_.fetch_sub(1, std::memory_order_relaxed); }

  Place place() const {
    return {epoch_.load(std::memory_order_relaxed), attempt_.load(std::memory_order_relaxed),
            step_.load(std::memory_order_relaxed), phase_.load(std::memory_order_relaxed)};
  }
  std::uint64_t beats() const { return beats_.load(std::memory_order_relaxed); }
  bool paused() const { return pauses_.load(std::memory_order_relaxed) > 0; }

 private:
  std::atomic<std::uint64_t> epoch_{0};
  std::atomic<std::uint64_t> attempt_{0};
  std::atomic<std::uint32_t> step_{0};
  std::atomic<Phase> phase_{Phase::kOutside};
  std::atomic<std::uint64_t> beats_{0};
  std::atomic<int> pauses_{0};
};

}  // namespace holdfast
