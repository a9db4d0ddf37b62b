// What a background thread has to tell the training loop, which asks in each attempt and is told nothing in
// almost all of them.
#pragma once

#include <atomic>
#include <cstddef>
#include <iterator>
#include <mutex>
#include <utility>
#include <vector>

namespace holdfast {

template <typename Outcome>
class OutcomeQueue {
 public:
  // So many wait without asking for memory.
  explicit OutcomeQueue(std::size_t usual) { outcomes_.reserve(usual); }

  // From any thread. Throws std::bad_alloc, with nothing put.
  void put(Outcome outcome) {
    const std::lock_guard lock(mutex_);
    outcomes_.push_back(std::move(outcome));
    any_.store(true, std::memory_order_release);
  }

  // In the order in which they were put; takes the lock only when there are some. What is put while it looks
  // may be seen only by the next call.
  std::vector<Outcome> take() {
    if (!any_.load(std::memory_order_acquire)) return {};
    const std::lock_guard lock(mutex_);
    std::vector<Outcome> taken(std::make_move_iterator(outcomes_.begin()),
                               std::make_move_iterator(outcomes_.end()));
    outcomes_.clear();
    any_.store(false, std::memory_order_relaxed);
    return taken;
  }

 private:
  std::atomic<bool> any_{false};
  std::mutex mutex_;
  std::vector<Outcome> outcomes_;  // guarded by mutex_
};

}  // namespace holdfast
