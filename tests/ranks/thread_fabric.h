// Communication between ranks that are threads.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>

#include "ranks/model_parallel.h"

namespace holdfast::model_parallel {

// What is sent is kept until it is received. Shared by all ranks.
class Mailboxes {
 public:
  void send(int from, int to, std::span<const float> values) {
    const std::lock_guard lock(mutex_);
    boxes_[{from, to}].emplace_back(values.begin(), values.end());
    changed_.notify_all();
  }
  Values receive(int from, int to) {
    std::unique_lock lock(mutex_);
    auto& box = boxes_[{from, to}];
    const bool came = changed_.wait_for(lock, std::chrono::seconds(20), [&] { return !box.empty(); });
    if (!came) throw std::runtime_error("a rank waits for what nobody sends");  // ends the test's process
    Values values = std::move(box.front());
    box.pop_front();
    return values;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::pair<int, int>, std::deque<Values>> boxes_;  // guarded by mutex_
};

// Of one rank.
class ThreadFabric final : public Fabric {
 public:
  ThreadFabric(Mailboxes& boxes, Place place) : boxes_(boxes), place_(place) {}
  void all_reduce(char axis, std::span<float> values) override {
    const Values theirs = exchange(axis, values);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] += theirs[i];
  }
  void all_gather_dp(std::span<const float> half, std::span<float> whole) override {
    const Values theirs = exchange('d', half);
    const Values mine(half.begin(), half.end());
    std::ranges::copy(place_.dp == 0 ? mine : theirs, whole.begin());
    std::ranges::copy(place_.dp == 0 ? theirs : mine, whole.begin() + std::ssize(half));
  }
  void send(int to, std::span<const float> values) override { boxes_.send(place_.rank, to, values); }
  void receive(int from, std::span<float> values) override {
    std::ranges::copy(boxes_.receive(from, place_.rank), values.begin());
  }

 private:
  Values exchange(char axis, std::span<const float> mine) {
    const int other = axis == 't' ? place_.rank ^ 1 : place_.replica();
    boxes_.send(place_.rank, other, mine);
    return boxes_.receive(other, place_.rank);
  }
  Mailboxes& boxes_;
  const Place place_;
};

}  // namespace holdfast::model_parallel
