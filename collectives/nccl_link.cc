#include "nccl_link.h"

#include <algorithm>
#include <cstring>
#include <future>
#include <list>
#include <mutex>
#include <new>
#include <system_error>

namespace holdfast {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kCallTime{1'000};  // for a call that is being made to return before an abort
constexpr milliseconds kLookTime{1};
constexpr milliseconds kCloseTime{30'000};  // for the others to be done, too

std::string describe(cudaError_t code) {
  return std::string(cudaGetErrorString(code)) + " (" + cudaGetErrorName(code) + ")";
}

void keep_for_ever(std::unique_ptr<ncclComm_t> place) {
  static std::mutex mutex;
  static std::list<std::unique_ptr<ncclComm_t>> kept;
  const std::lock_guard lock(mutex);
  kept.push_back(std::move(place));
}

}  // namespace

// ---- creation

Status NcclLink::allocate(int device, int size) {
  device_ = device;
  const std::size_t bytes = std::max(kChunk, static_cast<std::size_t>(size) * 64);
  void* memory[4] = {};
  cudaError_t code = cudaSetDevice(device);
  const char* what = "cudaSetDevice";
  const auto next = [&](const char* name, auto call) {
    if (code != cudaSuccess) return;
    what = name;
    code = call();
  };
  next("cudaStreamCreateWithFlags",
       [&] { return cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking); });
  next("cudaMalloc", [&] { return cudaMalloc(&memory[0], bytes); });
  buffer_ = static_cast<std::byte*>(memory[0]);
  next("cudaMalloc", [&] { return cudaMalloc(&memory[1], sizeof(cuda::DeviceVerdict)); });
  verdict_ = static_cast<cuda::DeviceVerdict*>(memory[1]);
  next("cudaMallocHost", [&] { return cudaMallocHost(&memory[2], bytes); });
  staging_ = static_cast<std::byte*>(memory[2]);
  next("cudaMallocHost", [&] { return cudaMallocHost(&memory[3], sizeof(cuda::SumBoard)); });
  next("cudaFuncGetAttributes", [] { return static_cast<cudaError_t>(cuda::prepare_publish()); });
  if (memory[3] != nullptr) {
    board_ = new (memory[3]) cuda::SumBoard{};
    board_->up = 1;
  }
  if (code == cudaSuccess) {
    // Whoever looks before there is a sum skips.
    const cuda::DeviceVerdict none{.sums = 0, .skip = 1};
    std::memcpy(staging_, &none, sizeof(none));
    next("cudaMemcpyAsync",
         [&] { return cudaMemcpyAsync(verdict_, staging_, sizeof(none), cudaMemcpyHostToDevice, stream_); });
  }
  next("the copy to the device", [&] {
    const Clock::time_point until = Clock::now() + deadline_;
    cudaError_t state = cudaErrorNotReady;
    while (state == cudaErrorNotReady && Clock::now() < until) state = cudaStreamQuery(stream_);
    return state;
  });
  if (code != cudaSuccess) {
    failure_ = Status::internal("device " + std::to_string(device) + ": " + what + ": " + describe(code));
  }
  return failure_;
}

Status NcclLink::connect(const ncclUniqueId& id, int rank, int size) {
  rank_ = rank;
  size_ = size;
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  return run("ncclCommInitRankConfig",
             [&](ncclComm_t) { return ncclCommInitRankConfig(&communicator_, size, id, rank, &config); });
}

// The new communicator is put in its place when the parent is done, on a thread of NCCL's: with a split that
// does not end, the place must stay.
Status NcclLink::split(ncclComm_t parent, int rank, int size) {
  rank_ = rank;
  size_ = size;
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  config.splitShare = 0;  // an abort of ours must not reach the parent
  auto place = std::make_unique<ncclComm_t>(nullptr);
  ncclResult_t state = ncclCommSplit(parent, 0, rank, place.get(), &config);
  Status s = poll("ncclCommSplit", [&](bool* done) {
    if (state == ncclInProgress) {
      const ncclResult_t asked = ncclCommGetAsyncError(parent, &state);
      if (asked != ncclSuccess) state = asked;
    }
    *done = state != ncclInProgress;
    if (!*done) return Status();
    communicator_ = *place;  // also of a split that failed: there may be something to abort
    return result(state, "ncclCommSplit", state == ncclSuccess ? "" : ncclGetLastError(parent));
  });
  if (state == ncclInProgress) keep_for_ever(std::move(place));
  if (!s.ok()) return s;
  if (communicator_ == nullptr) return fail("ncclCommSplit gave no communicator");
  return settle("ncclCommSplit");
}

// ---- calls

// ncclInProgress when there is nothing to say, or nobody to ask: poll() knows why.
ncclResult_t NcclLink::asynchronous_error(std::string* last) {
  ncclResult_t state = ncclInProgress;
  call_now([&](ncclComm_t communicator) {
    const ncclResult_t asked = ncclCommGetAsyncError(communicator, &state);
    if (asked != ncclSuccess) state = asked;
    if (state != ncclSuccess && state != ncclInProgress) *last = ncclGetLastError(communicator);
  });
  return state;
}

Status NcclLink::result(ncclResult_t code, const char* what, const std::string& last) {
  if (code == ncclSuccess) return Status();
  return fail(std::string(what) + ": " + ncclGetErrorString(code) +
              (last.empty() ? std::string() : ": " + last));
}

Status NcclLink::settle(const char* what) {
  return poll(what, [&](bool* done) {
    std::string last;
    const ncclResult_t state = asynchronous_error(&last);
    *done = state != ncclInProgress;
    return *done ? result(state, what, last) : Status();
  });
}

Status NcclLink::look_around() {
  std::string last;
  const ncclResult_t state = asynchronous_error(&last);
  return state == ncclInProgress ? Status() : result(state, "NCCL, while waiting", last);
}

Status NcclLink::check(cudaError_t code, const char* what) {
  if (code == cudaSuccess) return Status();
  return fail(std::string(what) + ": " + describe(code));
}

Status NcclLink::put(const void* bytes, std::size_t size, std::size_t offset) {
  if (!failure_.ok()) return failure_;
  std::memcpy(staging_ + offset, bytes, size);
  return check(cudaMemcpyAsync(buffer_ + offset, staging_ + offset, size, cudaMemcpyHostToDevice, stream_),
               "cudaMemcpyAsync to the device");
}

Status NcclLink::take(void* bytes, std::size_t size) {
  if (!failure_.ok()) return failure_;
  if (size > 0) {
    Status s = check(cudaMemcpyAsync(staging_, buffer_, size, cudaMemcpyDeviceToHost, stream_),
                     "cudaMemcpyAsync from the device");
    if (!s.ok()) return s;
  }
  Status s = poll("the collective on the device", [&](bool* done) {
    const cudaError_t code = cudaStreamQuery(stream_);
    *done = code == cudaSuccess;
    if (code != cudaSuccess && code != cudaErrorNotReady) return check(code, "cudaStreamQuery");
    return look_around();
  });
  if (s.ok() && size > 0) std::memcpy(bytes, staging_, size);
  return s;
}

// ---- health

Status NcclLink::known_failure() const {
  const std::lock_guard lock(mutex_);
  return known_;
}

void NcclLink::keep_failure(const std::string& what) {
  const std::lock_guard lock(mutex_);
  if (known_.ok()) known_ = Status(StatusCode::kRankMissing, what);
}

std::string NcclLink::aborted(const char* what) const {
  const Status why = known_failure();
  return std::string(what) + ": the communicator was aborted" +
         (why.ok() ? std::string() : ", for " + why.message());
}

Status NcclLink::health() {
  const std::lock_guard lock(mutex_);
  if (!known_.ok()) return known_;
  if (lost_) return Status(StatusCode::kRankMissing, "the communicator was aborted");
  question_ = true;
  asked_.notify_all();
  if (answering_ || closing_) return Status();
  try {
    std::thread([self = shared_from_this()] { self->answer_health(); }).detach();
    answering_ = true;
  } catch (const std::system_error&) {
    // No thread to be had now; it is tried again the next time.
  }
  return Status();
}

void NcclLink::answer_health() {
  std::unique_lock lock(mutex_);
  for (;;) {
    asked_.wait(lock, [this] { return question_ || closing_; });
    if (closing_) break;
    question_ = false;
    lock.unlock();
    std::string last;
    const ncclResult_t state = asynchronous_error(&last);
    if (state != ncclSuccess && state != ncclInProgress)
      keep_failure(std::string("asynchronous error of NCCL: ") + ncclGetErrorString(state) + ": " + last);
    lock.lock();
  }
  answering_ = false;
  asked_.notify_all();
}

// Waits for the thread's call, too, for which the communicator must stay.
void NcclLink::stop_answering() {
  std::unique_lock lock(mutex_);
  closing_ = true;
  asked_.notify_all();
  asked_.wait_for(lock, kCallTime, [this] { return !answering_; });
}

// ---- the end

Status NcclLink::fail(const std::string& what) {
  if (!failure_.ok()) return failure_;
  failure_ = Status(StatusCode::kRankMissing, what);
  keep_failure(what);
  abort();
  return failure_;
}

// Returns when `work` is done, or after `time`, in which case its thread goes on alone.
template <typename Work>
void NcclLink::run_for(milliseconds time, Work work) noexcept {
  try {
    std::promise<void> done;
    std::future<void> finished = done.get_future();
    std::thread thread([done = std::move(done), work = std::move(work)]() mutable {
      work();
      done.set_value();
    });
    if (finished.wait_for(time) == std::future_status::ready) {
      thread.join();
    } else {
      thread.detach();
    }
  } catch (const std::exception&) {
    // No thread or no memory to be had: the communicator is left as it is, unused.
  }
}

bool NcclLink::wait_until(Clock::time_point until, const std::atomic<bool>& flag, bool value) const {
  while (flag != value && Clock::now() < until) std::this_thread::sleep_for(kLookTime);
  return flag == value;
}

// What runs on the stream ends when the communicator does, so the board is told before.
void NcclLink::abort() noexcept {
  lost_ = true;
  if (abort_begun_.exchange(true)) return;
  if (board_ != nullptr) std::atomic_ref(board_->lost).store(1);
  run_for(kAbortTime, [self = shared_from_this()] { self->end_of_abort(); });
}

void NcclLink::end_of_abort() {
  // A call that does not return is what an abort is there to end.
  static_cast<void>(wait_until(Clock::now() + kCallTime, in_call_, false));
  static_cast<void>(cudaSetDevice(device_));
  if (communicator_ != nullptr) static_cast<void>(ncclCommAbort(communicator_));
  abort_ended_ = true;
}

void NcclLink::close() noexcept {
  const milliseconds time = (lost_ ? milliseconds(0) : std::min(deadline_, kCloseTime)) + kAbortTime;
  run_for(time, [self = shared_from_this()] {
    static_cast<void>(cudaSetDevice(self->device_));
    self->stop_answering();
    self->end_communicator();
    if (!self->abort_begun_ || self->wait_until(Clock::now() + kAbortTime, self->abort_ended_, true)) {
      self->release();
    }
  });
}

// The others may still be at work on what this rank is done with, so they are waited for.
void NcclLink::end_communicator() {
  if (communicator_ == nullptr || lost_) return;
  const bool free = wait_until(Clock::now() + kCallTime, in_call_, false);
  if (failure_.ok() && free && finalized()) {
    static_cast<void>(ncclCommDestroy(communicator_));
    communicator_ = nullptr;
    return;
  }
  abort();
}

bool NcclLink::finalized() {
  ncclResult_t state = ncclCommFinalize(communicator_);
  const Clock::time_point until = Clock::now() + std::min(deadline_, kCloseTime);
  while (state == ncclInProgress && Clock::now() < until) {
    std::this_thread::sleep_for(kLookTime);
    const ncclResult_t asked = ncclCommGetAsyncError(communicator_, &state);
    if (asked != ncclSuccess) return false;
  }
  return state == ncclSuccess;
}

void NcclLink::release() {
  // Nothing can be done about an error here.
  if (stream_ != nullptr) static_cast<void>(cudaStreamDestroy(stream_));
  static_cast<void>(cudaFree(buffer_));
  static_cast<void>(cudaFree(verdict_));
  static_cast<void>(cudaFreeHost(staging_));
  static_cast<void>(cudaFreeHost(board_));
  stream_ = nullptr;
}

}  // namespace holdfast
