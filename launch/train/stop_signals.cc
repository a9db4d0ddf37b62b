#include "train/stop_signals.h"

#include <atomic>
#include <csignal>

namespace holdfast::train {
namespace {

std::atomic<bool> requested{false};
static_assert(std::atomic<bool>::is_always_lock_free, "it is written by a signal handler");

std::atomic<bool> terminated{false};

void request(int signal) {
  requested.store(true, std::memory_order_relaxed);
  if (signal == SIGTERM) terminated.store(true, std::memory_order_relaxed);
}

}  // namespace

void install_stop_signals() {
  struct sigaction action = {};
  action.sa_handler = request;
  action.sa_flags = SA_RESTART;
  sigaction(SIGUSR1, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

bool asked_to_end() { return terminated.load(std::memory_order_relaxed); }
bool stop_requested() { return requested.load(std::memory_order_relaxed); }

}  // namespace holdfast::train
