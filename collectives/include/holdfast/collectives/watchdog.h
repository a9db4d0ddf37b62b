// Ends this process when its attempts stop making progress, so that a hang is never for ever.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string_view>
#include <thread>

#include "holdfast/collectives/status.h"

namespace holdfast {

// Where an attempt stands on this rank.
enum class Phase : std::uint8_t { kOutside, kBegin, kObserve, kDecide, kUpdate };
std::string_view phase_name(Phase phase);  // "outside", "begin", ...

// A thread that wakes at every tick and looks whether the attempt moved. Hangs are mostly met inside the
// trainer's own collectives, where the main thread sits in MPI and nothing can be returned to it: at the
// deadline the watchdog writes one line to stderr, which says where the attempt stood, and ends the process
// with _exit(84). It never calls MPI.
//
// It counts its own ticks, not wall-clock time: a machine that was suspended for an hour has seen one tick.
class Watchdog {
 public:
  struct Options {
    int rank = 0;
    std::chrono::milliseconds deadline = std::chrono::minutes(5);  // without progress; rounded up to ticks
    std::chrono::milliseconds tick = std::chrono::milliseconds(100);
  };

  explicit Watchdog(const Options& options);
  ~Watchdog();  // stops the thread
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  // Called by the training thread whenever it gets somewhere. A few relaxed stores, no system call.
  void progress(std::uint64_t epoch, std::uint64_t attempt, Phase phase);

  // Between pause() and resume() no tick counts: a long evaluation, a debugger. Calls nest.
  void pause();
  void resume();

 private:
  void watch();
  [[noreturn]] void expire() const;

  const Options options_;

  // Written by the training thread only, read by the watchdog's.
  std::atomic<std::uint64_t> beats_{0};
  std::atomic<std::uint64_t> epoch_{0};
  std::atomic<std::uint64_t> attempt_{0};
  std::atomic<Phase> phase_{Phase::kOutside};
  std::atomic<int> pauses_{0};

  std::mutex mutex_;
  std::condition_variable stop_changed_;
  bool stop_ = false;  // guarded by mutex_

  std::thread thread_;  // last: it uses all of the above
};

}  // namespace holdfast
