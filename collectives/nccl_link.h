// One rank's end of a NCCL communicator: what it allocated, how it waits, how it fails and how it ends.
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "holdfast/collectives/collective.h"
#include "nccl_verdict.h"

namespace holdfast {

// What may block without end (ncclCommAbort, freeing memory of a device on which a kernel hangs, and any call
// that is made for health()) is done on threads that share the link, and that are waited for only so long.
// All else is the owner's thread's, but for abort() and health().
class NcclLink : public std::enable_shared_from_this<NcclLink> {
 public:
  // What travels through device memory at once; at least the entries of a collective over all ranks.
  static constexpr std::size_t kChunk = std::size_t{1} << 20;
  static constexpr std::chrono::milliseconds kAbortTime{2'000};

  explicit NcclLink(std::chrono::milliseconds deadline) : deadline_(deadline) {}
  NcclLink(const NcclLink&) = delete;
  NcclLink& operator=(const NcclLink&) = delete;

  // Memory, stream and communicator. close() afterwards, whatever these return.
  Status allocate(int device, int size);
  Status connect(const ncclUniqueId& id, int rank, int size);
  Status split(ncclComm_t parent, int rank, int size);

  const Status& failure() const { return failure_; }
  int rank() const { return rank_; }
  int size() const { return size_; }
  std::byte* device() const { return buffer_; }
  cudaStream_t stream() const { return stream_; }
  cuda::DeviceVerdict* verdict() const { return verdict_; }
  cuda::SumBoard* board() const { return board_; }

  // Bytes to device() + offset, on the link's stream.
  Status put(const void* bytes, std::size_t size, std::size_t offset = 0);
  // Waits for the stream, and for `size` bytes from device().
  Status take(void* bytes, std::size_t size);

  // Calls `call(communicator)`, unless it is lost, and waits until NCCL has enqueued what it is to enqueue.
  template <typename Call>
  Status run(const char* what, Call&& call);

  // Calls `look(&done)` until it is done, or fails, or the link does.
  template <typename Look>
  Status poll(const char* what, Look&& look);

  Status check(cudaError_t code, const char* what);
  // Looks for an error that came up behind our back.
  Status look_around();
  Status fail(const std::string& what);

  // Gives what is known, and has NCCL asked on a thread of its own: the answer is there the next time. Should
  // NCCL not answer, nothing is known, and the owner cannot make its next call: that ends by the deadline.
  Status health();
  void abort() noexcept;
  void close() noexcept;

 private:
  using Clock = std::chrono::steady_clock;
  template <typename Call>
  bool call_now(Call&& call);
  ncclResult_t asynchronous_error(std::string* last);
  void answer_health();
  void stop_answering();
  Status known_failure() const;
  void keep_failure(const std::string& what);
  std::string aborted(const char* what) const;
  Status settle(const char* what);
  Status result(ncclResult_t code, const char* what, const std::string& last);
  bool wait_until(Clock::time_point until, const std::atomic<bool>& flag, bool value) const;
  void end_communicator();
  bool finalized();
  void end_of_abort();
  void release();
  template <typename Work>
  static void run_for(std::chrono::milliseconds time, Work work) noexcept;

  const std::chrono::milliseconds deadline_;
  Status failure_;

  // Constant once connected.
  int device_ = 0;
  int rank_ = 0;
  int size_ = 0;
  ncclComm_t communicator_ = nullptr;
  cudaStream_t stream_ = nullptr;
  std::byte* buffer_ = nullptr;             // on the device
  cuda::DeviceVerdict* verdict_ = nullptr;  // on the device
  std::byte* staging_ = nullptr;            // pinned, as large as the buffer
  cuda::SumBoard* board_ = nullptr;         // pinned

  // A communicator is not for several threads: whoever is to make a call takes in_call_, and comes back later
  // when somebody has it. Whoever ends the communicator sets lost_ or closing_, and then waits for in_call_;
  // whoever calls looks at them when it has it. So no call begins on a communicator that is being ended.
  std::atomic<bool> lost_{false};
  std::atomic<bool> closing_{false};
  std::atomic<bool> in_call_{false};
  std::atomic<std::thread::id> caller_{};  // who has it
  std::atomic<bool> abort_begun_{false};
  std::atomic<bool> abort_ended_{false};

  // What health() asks for, and the thread that does it.
  mutable std::mutex mutex_;
  std::condition_variable asked_;
  Status known_;  // the first failure, whoever met it
  bool question_ = false;
  bool answering_ = false;  // there is a thread
};

// Calls `call(communicator)`, unless another thread is in a call or the communicator has been ended. A call
// may make others.
template <typename Call>
bool NcclLink::call_now(Call&& call) {
  const auto self = std::this_thread::get_id();
  if (caller_ == self) return call(communicator_), true;
  if (in_call_.exchange(true)) return false;
  struct Place {  // `call` may throw
    NcclLink& link;
    ~Place() {
      link.caller_ = std::thread::id();
      link.in_call_ = false;
    }
  } const place{*this};
  caller_ = self;
  if (lost_ || closing_) return false;
  call(communicator_);
  return true;
}

template <typename Call>
Status NcclLink::run(const char* what, Call&& call) {
  if (!failure_.ok()) return failure_;
  ncclResult_t code = ncclSuccess;
  std::string last;
  Status made = poll(what, [&](bool* done) {
    *done = call_now([&](ncclComm_t communicator) {
      code = call(communicator);
      if (code != ncclSuccess && code != ncclInProgress) last = ncclGetLastError(communicator);
    });
    return Status();
  });
  if (!made.ok()) return made;
  if (code == ncclInProgress) return settle(what);
  return result(code, what, last);
}

// The flag is looked at last: what was completed by an abort is not complete.
template <typename Look>
Status NcclLink::poll(const char* what, Look&& look) {
  const Clock::time_point begin = Clock::now();
  for (;;) {
    bool done = false;
    if (Status s = look(&done); !s.ok()) return s;
    if (lost_) return fail(aborted(what));
    if (done) return Status();
    const auto waited = Clock::now() - begin;
    if (waited >= deadline_) {
      return fail(std::string(what) + " did not end within " + std::to_string(deadline_.count()) +
                  " ms: a rank is missing or stuck");
    }
    if (waited < std::chrono::milliseconds(1)) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
}

}  // namespace holdfast
