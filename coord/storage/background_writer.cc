#include "holdfast/coord/storage/background_writer.h"

#include <algorithm>
#include <system_error>
#include <utility>

namespace holdfast {

BackgroundWriter::BackgroundWriter(std::size_t most_waiting)
    : most_waiting_(std::max<std::size_t>(most_waiting, 1)) {}

BackgroundWriter::~BackgroundWriter() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void BackgroundWriter::submit(std::function<void()> job) {
  std::unique_lock lock(mutex_);
  if (!thread_.joinable()) {
    try {
      thread_ = std::thread([this] { run(); });
    } catch (const std::system_error&) {
      run_one(lock, std::move(job));
      return;
    }
  }
  changed_.wait(lock, [this] { return jobs_.size() < most_waiting_; });
  jobs_.push_back(std::move(job));
  lock.unlock();
  changed_.notify_all();
}

bool BackgroundWriter::idle() const {
  const std::lock_guard lock(mutex_);
  return jobs_.empty() && !running_;
}

void BackgroundWriter::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return jobs_.empty() && !running_; });
}

bool BackgroundWriter::wait_for(std::chrono::milliseconds most) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, most, [this] { return jobs_.empty() && !running_; });
}

void BackgroundWriter::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return ending_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    std::function<void()> job = std::move(jobs_.front());
    jobs_.pop_front();
    run_one(lock, std::move(job));
  }
}

void BackgroundWriter::run_one(std::unique_lock<std::mutex>& lock, std::function<void()> job) {
  running_ = true;
  lock.unlock();
  changed_.notify_all();
  job();
  job = nullptr;  // what it holds is gone before anybody is told that it is done
  lock.lock();
  running_ = false;
  changed_.notify_all();
}

}  // namespace holdfast
