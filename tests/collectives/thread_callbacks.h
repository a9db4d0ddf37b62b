// A transport of callbacks between threads, which can be told to fail.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "holdfast/collectives/callback_collective.h"

namespace holdfast {

class ThreadTransport {
 public:
  // `own_functions`: gather and broadcast have callbacks, too.
  ThreadTransport(int size, bool own_functions, std::chrono::milliseconds patience = std::chrono::seconds(60))
      : ranks_(static_cast<std::size_t>(size)), own_functions_(own_functions), patience_(patience) {
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      ranks_[r].transport = this;
      ranks_[r].rank = r;
    }
  }

  holdfast_callbacks callbacks(int rank, std::uint64_t node = 1) {
    return {.struct_bytes = sizeof(holdfast_callbacks),
            .context = &ranks_[static_cast<std::size_t>(rank)],
            .rank = rank,
            .size = static_cast<std::int32_t>(ranks_.size()),
            .node = node,
            .all_reduce = all_reduce,
            .gather = own_functions_ ? gather : nullptr,
            .broadcast = own_functions_ ? broadcast : nullptr,
            .describe = describe};
  }

  // Called ahead of rank's n-th callback (from 1 on), with its name. What it returns is returned if it is not
  // 0.
  using Before = std::function<int(int n, const std::string& name)>;
  void before(int rank, Before before) { ranks_[static_cast<std::size_t>(rank)].before = std::move(before); }
  int calls(int rank) const { return ranks_[static_cast<std::size_t>(rank)].calls; }

  // Calls body on each rank, as a thread of its own.
  void run(const std::function<void(Collective&)>& body,
           const std::function<std::uint64_t(int)>& node_of = {}) {
    std::vector<std::jthread> threads;
    for (int r = 0; r < static_cast<int>(ranks_.size()); ++r) {
      threads.emplace_back([&, r] {
        std::unique_ptr<Collective> collective;
        const Status status = CallbackCollective::create(callbacks(r, node_of ? node_of(r) : 1), &collective);
        EXPECT_TRUE(status.ok()) << status.to_string();
        if (collective) body(*collective);
      });
    }
  }

 private:
  struct Rank {
    ThreadTransport* transport = nullptr;
    std::size_t rank = 0;
    int calls = 0;
    Before before;
  };
  static constexpr int kLate = 11;

  static int enter(Rank& rank, const char* name) {
    return ++rank.calls, rank.before ? rank.before(rank.calls, name) : 0;
  }

  static int all_reduce(void* context, std::uint64_t* values, std::size_t count) {
    Rank& rank = *static_cast<Rank*>(context);
    if (const int code = enter(rank, "all_reduce"); code != 0) return code;
    std::vector<std::uint64_t> sum(count);
    const bool came = rank.transport->all_see(rank.rank, values, [&](const std::vector<const void*>& slots) {
      for (const void* slot : slots) {
        for (std::size_t i = 0; i < count; ++i) sum[i] += static_cast<const std::uint64_t*>(slot)[i];
      }
    });
    if (came) std::memcpy(values, sum.data(), count * sizeof sum[0]);
    return came ? 0 : kLate;
  }

  static int gather(void* context, const void* mine, const std::uint64_t* bytes, void* const* all) {
    Rank& rank = *static_cast<Rank*>(context);
    if (const int code = enter(rank, "gather"); code != 0) return code;
    const bool came = rank.transport->all_see(rank.rank, mine, [&](const std::vector<const void*>& slots) {
      for (std::size_t r = 0; all != nullptr && r < slots.size(); ++r) {
        if (bytes[r] != 0) std::memcpy(all[r], slots[r], bytes[r]);
      }
    });
    return came ? 0 : kLate;
  }

  static int broadcast(void* context, void* data, std::uint64_t bytes) {
    Rank& rank = *static_cast<Rank*>(context);
    if (const int code = enter(rank, "broadcast"); code != 0) return code;
    const bool came = rank.transport->all_see(rank.rank, data, [&](const std::vector<const void*>& slots) {
      if (rank.rank != 0) std::memcpy(data, slots.front(), bytes);
    });
    return came ? 0 : kLate;
  }

  static const char* describe(void*, int code) { return code == kLate ? "a rank did not come" : nullptr; }

  template <typename Read>
  bool all_see(std::size_t rank, const void* mine, Read&& read) {
    {
      const std::lock_guard lock(mutex_);
      slots_.resize(ranks_.size());
      slots_[rank] = mine;
    }
    if (!barrier()) return false;
    read(slots_);
    return barrier();
  }

  bool barrier() {
    std::unique_lock lock(mutex_);
    const std::uint64_t round = round_;
    if (++waiting_ == ranks_.size()) {
      waiting_ = 0;
      ++round_;
      changed_.notify_all();
      return true;
    }
    return changed_.wait_for(lock, patience_, [&] { return round_ != round; });
  }

  std::vector<Rank> ranks_;
  const bool own_functions_;
  const std::chrono::milliseconds patience_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<const void*> slots_;
  std::size_t waiting_ = 0;
  std::uint64_t round_ = 0;
};

}  // namespace holdfast
