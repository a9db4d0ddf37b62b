// Ranks as threads of one process: for tests of code that is written against Collective.
#pragma once

#include <chrono>
#include <functional>
#include <memory>

#include "holdfast/collectives/collective.h"

namespace holdfast {

// A group of `size` ranks, each a thread.
class ThreadGroup {
 public:
  // A rank that waits longer than `patience` for the others in a collective gets RANK_MISSING, and so does
  // every later collective of the group.
  explicit ThreadGroup(int size, std::chrono::milliseconds patience = std::chrono::seconds(30));
  ~ThreadGroup();
  ThreadGroup(const ThreadGroup&) = delete;
  ThreadGroup& operator=(const ThreadGroup&) = delete;

  // Calls body(collective) on size() threads, one a rank, and returns when all have returned. An exception
  // that leaves `body` ends the process.
  void run(const std::function<void(Collective&)>& body);

 private:
  class Exchange;
  class Rank;
  const std::unique_ptr<Exchange> exchange_;
};

}  // namespace holdfast
