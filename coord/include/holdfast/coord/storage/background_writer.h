// Work that the training loop does not wait for, in order, on one thread.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace holdfast {

class BackgroundWriter {
 public:
  // At most `most_waiting` jobs (at least 1) wait; the thread that submits another waits until one has begun.
  explicit BackgroundWriter(std::size_t most_waiting = 1);
  ~BackgroundWriter();  // waits for all jobs
  BackgroundWriter(const BackgroundWriter&) = delete;
  BackgroundWriter& operator=(const BackgroundWriter&) = delete;

  // From one thread at a time, and never from a job: with the queue full it would wait for itself. `job` must
  // not throw; it is run on the writer's thread, which is started at the first, or here when the system has
  // no thread left.
  void submit(std::function<void()> job);
  // No job is waiting or running.
  bool idle() const;
  void wait();
  // Whether it became idle in time. A job cannot be stopped: one that hangs in the file system goes on
  // hanging.
  bool wait_for(std::chrono::milliseconds most);

 private:
  void run();
  void run_one(std::unique_lock<std::mutex>& lock, std::function<void()> job);

  const std::size_t most_waiting_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> jobs_;  // guarded by mutex_
  bool running_ = false;                    // guarded by mutex_: a job
  bool ending_ = false;                     // guarded by mutex_
  std::thread thread_;                      // started with the first job
};

}  // namespace holdfast
