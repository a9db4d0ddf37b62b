#include "holdfast/collectives/thread_collective.h"

#include <condition_variable>
#include <mutex>
#include <thread>

namespace holdfast {

// A table with a slot for each rank, and a barrier that gives up.
class ThreadGroup::Exchange {
 public:
  Exchange(int size, std::chrono::milliseconds patience)
      : slots_(static_cast<std::size_t>(size)), patience_(patience) {}

  int size() const { return static_cast<int>(slots_.size()); }

  // Shows every rank's `mine` to every rank: read(slots) runs while none of them can change.
  Status all_see(int rank, const void* mine, const std::function<void(std::span<const void* const>)>& read) {
    slots_[static_cast<std::size_t>(rank)] = mine;
    if (Status s = barrier(); !s.ok()) return s;
    read(slots_);
    return barrier();
  }

 private:
  Status barrier() {
    std::unique_lock lock(mutex_);
    if (!broken_) {
      const std::uint64_t round = round_;
      if (++waiting_ == size()) {
        waiting_ = 0;
        ++round_;
        changed_.notify_all();
      } else if (!changed_.wait_for(lock, patience_, [&] { return round_ != round || broken_; })) {
        broken_ = true;
        changed_.notify_all();
      }
      if (round_ != round) return Status();
    }
    return {StatusCode::kRankMissing, "a rank did not come to the collective"};
  }

  std::vector<const void*> slots_;  // slot r is written by rank r, and read between two barriers
  const std::chrono::milliseconds patience_;

  std::mutex mutex_;
  std::condition_variable changed_;
  int waiting_ = 0;          // guarded by mutex_
  std::uint64_t round_ = 0;  // guarded by mutex_
  bool broken_ = false;      // guarded by mutex_
};

class ThreadGroup::Rank final : public Collective {
 public:
  Rank(int rank, Exchange& exchange) : rank_(rank), exchange_(exchange) {}

  int rank() const override { return rank_; }
  int size() const override { return exchange_.size(); }

  Status reduce(Record& record) override {
    Record sum;
    Status s = exchange_.all_see(rank_, &record, [&](auto slots) {
      for (const void* slot : slots) sum += *static_cast<const Record*>(slot);
    });
    if (s.ok()) record = sum;
    return s;
  }

  // All ranks are one node.
  Status gather(const Bytes& mine, std::vector<Bytes>* all, int most_per_node) override {
    return exchange_.all_see(rank_, &mine, [&](auto slots) {
      if (rank_ != 0) return;
      all->assign(slots.size(), Bytes());
      int kept = 0;
      for (std::size_t r = 0; r < slots.size(); ++r) {
        const Bytes& bytes = *static_cast<const Bytes*>(slots[r]);
        if (bytes.empty() || kept == most_per_node) continue;
        (*all)[r] = bytes;
        ++kept;
      }
    });
  }

  Status broadcast(Bytes* bytes) override {
    Bytes from_root;
    Status s = exchange_.all_see(rank_, bytes,
                                 [&](auto slots) { from_root = *static_cast<const Bytes*>(slots.front()); });
    if (s.ok()) *bytes = std::move(from_root);
    return s;
  }

 private:
  const int rank_;
  Exchange& exchange_;
};

ThreadGroup::ThreadGroup(int size, std::chrono::milliseconds patience)
    : exchange_(std::make_unique<Exchange>(size, patience)) {}

ThreadGroup::~ThreadGroup() = default;

void ThreadGroup::run(const std::function<void(Collective&)>& body) {
  std::vector<std::jthread> threads;
  for (int r = 0; r < exchange_->size(); ++r) {
    threads.emplace_back([&, r] {
      Rank rank(r, *exchange_);
      body(rank);
    });
  }
}

}  // namespace holdfast
