#include "holdfast/collectives/watchdog.h"

#include <unistd.h>

#include <array>
#include <cstdio>

namespace holdfast {

std::string_view phase_name(Phase phase) {
  constexpr std::array<std::string_view, 5> kNames = {"outside", "begin", "observe", "decide", "update"};
  return kNames[static_cast<std::size_t>(phase)];
}

Watchdog::Watchdog(const Options& options) : options_(options), thread_([this] { watch(); }) {}

Watchdog::~Watchdog() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  stop_changed_.notify_one();
  thread_.join();
}

void Watchdog::progress(std::uint64_t epoch, std::uint64_t attempt, Phase phase) {
  epoch_.store(epoch, std::memory_order_relaxed);
  attempt_.store(attempt, std::memory_order_relaxed);
  phase_.store(phase, std::memory_order_relaxed);
  // One writer, so no read-modify-write is needed.
  beats_.store(beats_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
}

void Watchdog::pause() { pauses_.fetch_add(1, std::memory_order_relaxed); }
void Watchdog::resume() { pauses_.fetch_sub(1, std::memory_order_relaxed); }

void Watchdog::watch() {
  const auto limit = (options_.deadline + options_.tick - std::chrono::milliseconds(1)) / options_.tick;
  std::uint64_t seen = beats_.load(std::memory_order_relaxed);
  std::int64_t ticks = 0;
  std::unique_lock lock(mutex_);
  while (!stop_changed_.wait_for(lock, options_.tick, [this] { return stop_; })) {
    const std::uint64_t now = beats_.load(std::memory_order_relaxed);
    const bool moved = now != seen || pauses_.load(std::memory_order_relaxed) > 0;
    ticks = moved ? 0 : ticks + 1;
    seen = now;
    if (ticks >= limit) expire();
  }
}

void Watchdog::expire() const {
  char host[256] = "?";
  gethostname(host, sizeof(host) - 1);
  char line[512];
  const int length = std::snprintf(
      line, sizeof(line),
      "holdfast: rank %d (host %s, pid %d) made no progress for %.1f s: attempt %llu of epoch %llu stands at "
      "phase %s. A rank is missing or stuck; leaving with exit code %d.\n",
      options_.rank, host, static_cast<int>(getpid()), static_cast<double>(options_.deadline.count()) / 1000.0,
      static_cast<unsigned long long>(attempt_.load(std::memory_order_relaxed)),
      static_cast<unsigned long long>(epoch_.load(std::memory_order_relaxed)),
      phase_name(phase_.load(std::memory_order_relaxed)).data(), static_cast<int>(StatusCode::kRankMissing));
  [[maybe_unused]] const auto written = write(STDERR_FILENO, line, static_cast<std::size_t>(length));
  _exit(static_cast<int>(StatusCode::kRankMissing));
}

}  // namespace holdfast
