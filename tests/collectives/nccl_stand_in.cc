#include "collectives/nccl_stand_in.h"

#include <nccl.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>

#include "nccl_verdict.h"

using holdfast::Record;
using holdfast::stand_in::Fault;
using holdfast::stand_in::Kind;

struct CUstream_st {
  int device = 0;
  bool destroyed = false;
  std::deque<std::function<bool()>> work;  // true when done
};

namespace {

// One collective of a clique.
struct Meeting {
  std::string what;  // kind, root and bytes
  std::map<int, std::vector<std::byte>> sent;
  std::set<int> left;
};

struct Clique {
  int size = 0;
  std::set<int> arrived;
  std::map<std::uint64_t, Meeting> meetings;
  std::map<std::pair<int, int>, std::deque<std::vector<std::byte>>> mail;  // from, to
  std::map<std::uint64_t, std::shared_ptr<Clique>> children;
  std::set<int> finalizing;
};

}  // namespace

struct ncclComm {
  std::shared_ptr<Clique> clique;
  int rank = 0;
  bool ended = false;  // aborted or destroyed
  bool aborted = false;
  bool callers = false;
  ncclResult_t error = ncclSuccess;
  std::function<bool()> pending;  // what is in progress
  cudaStream_t pending_stream = nullptr;
  int polls_left = 0;
  std::uint64_t meetings = 0;
  std::uint64_t splits = 0;
};

namespace {

struct Allocation {
  std::size_t bytes = 0;
  bool pinned = false;
  int owner = -1;  // the device, of a caller's
};

struct World {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<Fault> faults;
  std::map<int, std::map<std::string, int>> calls;
  std::map<std::byte*, Allocation> memory;
  std::vector<std::unique_ptr<CUstream_st>> streams;
  std::vector<std::unique_ptr<ncclComm>> communicators;
  std::map<std::string, std::shared_ptr<Clique>> cliques;
  std::vector<std::string> misuse;
  std::vector<cudaStream_t> callers_streams;
  int late = 0;
  int ids = 0;
  bool released = false;
};

World& world() {
  static World one;
  return one;
}

thread_local int current_device = -1;

using Lock = std::unique_lock<std::mutex>;

void complain(const std::string& what) { world().misuse.push_back(what); }

// Counts the call, and says what is to go wrong with it.
std::optional<Kind> enter(Lock& lock, const char* function) {
  World& w = world();
  const int number = ++w.calls[current_device][function];
  for (const Fault& fault : w.faults) {
    if (fault.function != function || fault.rank != current_device || fault.call != number) continue;
    if (fault.kind == Kind::kNeverReturns) w.changed.wait(lock, [&] { return w.released; });
    return fault.kind;
  }
  return std::nullopt;
}

bool inside(const void* data, std::size_t bytes, bool pinned) {
  const auto* at = static_cast<const std::byte*>(data);
  for (const auto& [begin, allocation] : world().memory) {
    if (at >= begin && at + bytes <= begin + allocation.bytes) return allocation.pinned == pinned;
  }
  return false;
}

bool usable(cudaStream_t stream, const char* function) {
  for (const auto& communicator : world().communicators) {
    if (!communicator->ended && communicator->pending && communicator->pending_stream == stream) {
      complain(std::string(function) + " behind a collective that is still to be enqueued");
    }
  }
  if (stream->destroyed) complain(std::string(function) + " on a stream that was destroyed");
  if (stream->device != current_device) complain(std::string(function) + " with another device current");
  return !stream->destroyed;
}

void pump() {
  for (bool moved = true; moved;) {
    moved = false;
    for (const auto& stream : world().streams) {
      while (!stream->work.empty() && stream->work.front()()) {
        stream->work.pop_front();
        moved = true;
      }
    }
  }
}

cudaError_t allocate(void** out, std::size_t bytes, bool pinned, const char* function) {
  Lock lock(world().mutex);
  if (enter(lock, function)) return cudaErrorMemoryAllocation;
  auto* data = static_cast<std::byte*>(std::malloc(bytes));
  std::memset(data, 0xa5, bytes);
  world().memory[data] = {bytes, pinned};
  *out = data;
  return cudaSuccess;
}

cudaError_t deallocate(void* data, bool pinned, const char* function) {
  Lock lock(world().mutex);
  const auto fault = enter(lock, function);
  if (data == nullptr) return cudaSuccess;
  const auto found = world().memory.find(static_cast<std::byte*>(data));
  if (found == world().memory.end() || found->second.pinned != pinned) {
    complain(std::string(function) + " of what is not there");
  } else {
    std::free(found->first);
    world().memory.erase(found);
  }
  return fault ? cudaErrorUnknown : cudaSuccess;
}

// ---- NCCL

bool usable(ncclComm_t communicator, const char* function) {
  if (communicator == nullptr) {
    complain(std::string(function) + " without a communicator");
    return false;
  }
  if (communicator->ended) complain(std::string(function) + " on a communicator that has ended");
  if (communicator->pending) complain(std::string(function) + " while another call is in progress");
  return !communicator->ended && !communicator->pending;
}

ncclResult_t begin(ncclComm_t communicator, std::function<bool()> work, cudaStream_t stream = nullptr) {
  if (world().late == 0 && work()) return ncclSuccess;
  communicator->pending = std::move(work);
  communicator->pending_stream = stream;
  communicator->polls_left = world().late;
  return ncclInProgress;
}

ncclComm_t add_communicator(std::shared_ptr<Clique> clique, int rank) {
  world().communicators.push_back(std::make_unique<ncclComm>());
  ncclComm_t made = world().communicators.back().get();
  made->clique = std::move(clique);
  made->rank = rank;
  return made;
}

using Read = std::function<void(const Meeting&)>;

// A collective over all ranks: everybody leaves a copy of `send`, and reads when all did.
ncclResult_t meet(const char* function, const std::string& what, const void* send, std::size_t sent,
                  void* receive, std::size_t received, ncclComm_t communicator, cudaStream_t stream,
                  const Read& read) {
  Lock lock(world().mutex);
  const auto fault = enter(lock, function);
  if (fault == Kind::kError || fault == Kind::kNeverReturns) return ncclSystemError;
  if (!usable(communicator, function) || stream->destroyed) return ncclInvalidUsage;
  const std::uint64_t number = communicator->meetings++;
  auto work = [=, here = false]() mutable {
    const auto& clique = communicator->clique;
    if (communicator->aborted) {  // half a result
      if (inside(receive, received, false) && here) read(clique->meetings[number]);
      return true;
    }
    if (!inside(receive, received, false) || (send != nullptr && !inside(send, sent, false))) {
      complain(std::string(function) + " on memory that is not the device's");
      return true;
    }
    Meeting& meeting = clique->meetings[number];
    if (!here) {
      if (meeting.sent.empty()) meeting.what = what;
      if (meeting.what != what) complain("a rank is at " + what + ", another at " + meeting.what);
      const auto* data = static_cast<const std::byte*>(send);
      meeting.sent[communicator->rank].assign(data, data == nullptr ? data : data + sent);
      here = true;
    }
    if (fault == Kind::kNeverCompletes || static_cast<int>(meeting.sent.size()) < clique->size) return false;
    read(meeting);
    meeting.left.insert(communicator->rank);
    if (static_cast<int>(meeting.left.size()) == clique->size) clique->meetings.erase(number);
    return true;
  };
  return begin(
      communicator,
      [=] {
        stream->work.emplace_back(work);
        return true;
      },
      stream);
}

ncclResult_t mail(const char* function, const void* send, void* receive, std::size_t bytes, int peer,
                  ncclComm_t communicator, cudaStream_t stream) {
  Lock lock(world().mutex);
  const auto fault = enter(lock, function);
  if (fault == Kind::kError || fault == Kind::kNeverReturns) return ncclSystemError;
  if (!usable(communicator, function) || stream->destroyed) return ncclInvalidUsage;
  auto work = [=, sent = false]() mutable {
    if (communicator->aborted) return true;
    if (fault == Kind::kNeverCompletes) return false;
    if (!inside(send != nullptr ? send : receive, bytes, false)) {
      complain(std::string(function) + " on memory that is not the device's");
      return true;
    }
    auto& clique = *communicator->clique;
    if (send != nullptr) {  // done when it was taken
      auto& box = clique.mail[{communicator->rank, peer}];
      const auto* data = static_cast<const std::byte*>(send);
      if (!sent) box.emplace_back(data, data + bytes);
      sent = true;
      return box.empty();
    }
    auto& box = clique.mail[{peer, communicator->rank}];
    if (box.empty()) return false;
    if (box.front().size() != bytes) complain("a message of another size was awaited");
    std::memcpy(receive, box.front().data(), std::min(bytes, box.front().size()));
    box.pop_front();
    return true;
  };
  return begin(
      communicator,
      [=] {
        stream->work.emplace_back(work);
        return true;
      },
      stream);
}

std::string say(const char* what, std::size_t bytes, int root = 0) {
  return std::string(what) + " of " + std::to_string(bytes) + " from " + std::to_string(root);
}

}  // namespace

// ---- the runtime

cudaError_t cudaSetDevice(int device) {
  current_device = device;
  Lock lock(world().mutex);
  return enter(lock, "cudaSetDevice") ? cudaErrorInvalidDevice : cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t) { return "an injected error"; }
const char* cudaGetErrorName(cudaError_t) { return "cudaErrorInjected"; }

cudaError_t cudaMalloc(void** data, std::size_t bytes) { return allocate(data, bytes, false, "cudaMalloc"); }
cudaError_t cudaFree(void* data) { return deallocate(data, false, "cudaFree"); }
cudaError_t cudaMallocHost(void** data, std::size_t bytes) {
  return allocate(data, bytes, true, "cudaMallocHost");
}
cudaError_t cudaFreeHost(void* data) { return deallocate(data, true, "cudaFreeHost"); }

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  Lock lock(world().mutex);
  if (enter(lock, "cudaStreamCreateWithFlags")) return cudaErrorUnknown;
  world().streams.push_back(std::make_unique<CUstream_st>());
  *stream = world().streams.back().get();
  (*stream)->device = current_device;
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  Lock lock(world().mutex);
  const auto fault = enter(lock, "cudaStreamDestroy");
  if (stream->destroyed) complain("cudaStreamDestroy twice");
  pump();
  stream->destroyed = true;
  stream->work.clear();
  return fault ? cudaErrorUnknown : cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  Lock lock(world().mutex);
  if (enter(lock, "cudaStreamQuery")) return cudaErrorUnknown;
  usable(stream, "cudaStreamQuery");
  pump();
  return stream->work.empty() ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  Lock lock(world().mutex);
  if (enter(lock, "cudaMemcpyAsync")) return cudaErrorUnknown;
  if (!usable(stream, "cudaMemcpyAsync")) return cudaErrorUnknown;
  const bool up = kind == cudaMemcpyHostToDevice;
  stream->work.emplace_back([=] {
    if (!inside(to, bytes, !up) || !inside(from, bytes, up)) {
      complain("cudaMemcpyAsync of memory that is not there, or not pinned");
    } else {
      std::memcpy(to, from, bytes);
    }
    return true;
  });
  return cudaSuccess;
}

namespace holdfast::cuda {

int prepare_publish() {
  Lock lock(world().mutex);
  return enter(lock, "prepare_publish") ? cudaErrorUnknown : cudaSuccess;
}

int launch_publish(const std::uint64_t* sum, std::uint64_t world_size, DeviceVerdict* verdict,
                   SumBoard* board, CUstream_st* stream) {
  Lock lock(world().mutex);
  if (enter(lock, "launch_publish")) return cudaErrorUnknown;
  if (!usable(stream, "launch_publish")) return cudaErrorUnknown;
  stream->work.emplace_back([=] {
    if (!inside(sum, sizeof(Record), false) || !inside(verdict, sizeof(*verdict), false) ||
        !inside(board, sizeof(*board), true)) {
      complain("a verdict in memory that is not there");
      return true;
    }
    bool refuses = std::atomic_ref(board->lost).load() != 0;
    for (std::size_t lane = 0; lane < Record::kLanes; ++lane) {
      std::atomic_ref(board->lanes[verdict->sums % SumBoard::kSlots][lane])
          .store(sum[lane], std::memory_order_relaxed);
      refuses = refuses || lane_refuses(lane, sum, world_size);
    }
    verdict->skip = refuses ? 1 : 0;
    ++verdict->sums;
    std::atomic_ref(board->sums).store(verdict->sums, std::memory_order_release);
    return true;
  });
  return cudaSuccess;
}

}  // namespace holdfast::cuda

// ---- NCCL

extern "C" {

const char* ncclGetErrorString(ncclResult_t code) {
  return code == ncclRemoteError ? "remote process exited" : "injected system error";
}
const char* ncclGetLastError(ncclComm_t communicator) {
  Lock lock(world().mutex);
  if (communicator != nullptr && communicator->ended) complain("ncclGetLastError of an ended communicator");
  return "the last words";
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  Lock lock(world().mutex);
  if (enter(lock, "ncclGetUniqueId")) return ncclSystemError;
  std::memset(id->internal, 0, sizeof(id->internal));
  const std::string name = "id " + std::to_string(++world().ids);
  std::memcpy(id->internal, name.data(), name.size());
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* out, int size, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  Lock lock(world().mutex);
  if (enter(lock, "ncclCommInitRankConfig")) return ncclSystemError;
  if (config->blocking != 0) complain("a communicator that blocks");
  auto& clique = world().cliques[id.internal];
  if (!clique) clique = std::make_shared<Clique>();
  clique->size = size;
  *out = add_communicator(clique, rank);
  if (!clique->arrived.insert(rank).second) complain("a rank that is there twice");
  return begin(*out, [clique, size] { return static_cast<int>(clique->arrived.size()) == size; });
}

ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int key, ncclComm_t* out, ncclConfig_t* config) {
  Lock lock(world().mutex);
  if (enter(lock, "ncclCommSplit")) return ncclSystemError;
  if (!usable(parent, "ncclCommSplit")) return ncclInvalidUsage;
  if (color != 0 || key != parent->rank || config->blocking != 0 || config->splitShare != 0) {
    complain("a split into something else than a copy of its own");
  }
  auto& clique = parent->clique->children[parent->splits++];
  if (!clique) clique = std::make_shared<Clique>();
  clique->size = parent->clique->size;
  clique->arrived.insert(parent->rank);
  return begin(parent, [=] {
    if (static_cast<int>(clique->arrived.size()) < clique->size) return false;
    *out = add_communicator(clique, key);
    return true;
  });
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t communicator, ncclResult_t* state) {
  Lock lock(world().mutex);
  const auto fault = enter(lock, "ncclCommGetAsyncError");
  if (communicator == nullptr || communicator->ended) {
    complain("ncclCommGetAsyncError of an ended communicator");
    return ncclInvalidArgument;
  }
  if (fault == Kind::kAsyncError) communicator->error = ncclRemoteError;
  if (fault && fault != Kind::kAsyncError) return ncclSystemError;
  if (communicator->pending && communicator->polls_left-- <= 0 && communicator->pending()) {
    communicator->pending = nullptr;
  }
  *state = communicator->pending ? ncclInProgress : ncclSuccess;
  if (communicator->error != ncclSuccess) *state = communicator->error;
  return ncclSuccess;
}

#define HOLDFAST_ASK(function, value)                              \
  ncclResult_t function(const ncclComm_t communicator, int* out) { \
    Lock lock(world().mutex);                                      \
    if (enter(lock, #function)) return ncclSystemError;            \
    if (!usable(communicator, #function)) return ncclInvalidUsage; \
    *out = value;                                                  \
    return ncclSuccess;                                            \
  }
HOLDFAST_ASK(ncclCommCount, communicator->clique->size)
HOLDFAST_ASK(ncclCommUserRank, communicator->rank)
HOLDFAST_ASK(ncclCommCuDevice, communicator->rank)

ncclResult_t ncclCommFinalize(ncclComm_t communicator) {
  Lock lock(world().mutex);
  const auto fault = enter(lock, "ncclCommFinalize");
  if (fault) return ncclSystemError;
  if (!usable(communicator, "ncclCommFinalize")) return ncclInvalidUsage;
  const auto clique = communicator->clique;
  clique->finalizing.insert(communicator->rank);
  return begin(communicator,
               [clique] { return static_cast<int>(clique->finalizing.size()) == clique->size; });
}

ncclResult_t ncclCommDestroy(ncclComm_t communicator) {
  Lock lock(world().mutex);
  const auto fault = enter(lock, "ncclCommDestroy");
  if (!usable(communicator, "ncclCommDestroy")) return ncclInvalidUsage;
  if (!communicator->clique->finalizing.contains(communicator->rank)) complain("destroyed, not finalized");
  communicator->ended = true;
  return fault ? ncclSystemError : ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t communicator) {
  Lock lock(world().mutex);
  if (communicator == nullptr || communicator->ended) {
    complain("ncclCommAbort of an ended communicator");
    return ncclInvalidArgument;
  }
  const auto fault = enter(lock, "ncclCommAbort");
  communicator->ended = true;
  communicator->aborted = true;
  communicator->pending = nullptr;
  communicator->clique->finalizing.insert(communicator->rank);  // nobody waits for it
  return fault ? ncclSystemError : ncclSuccess;
}

ncclResult_t ncclAllReduce(const void* send, void* receive, std::size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t communicator, cudaStream_t stream) {
  const std::size_t bytes = count * sizeof(std::uint64_t);
  return meet("ncclAllReduce", say("all-reduce", bytes), send, bytes, receive, bytes, communicator, stream,
              [=](const Meeting& meeting) {
                if (type != ncclUint64 || op != ncclSum) complain("another reduction than the records'");
                auto* sums = static_cast<std::uint64_t*>(receive);
                std::fill(sums, sums + count, std::uint64_t{0});
                for (const auto& [rank, sent] : meeting.sent) {
                  for (std::size_t i = 0; i < count; ++i) {
                    std::uint64_t value = 0;
                    std::memcpy(&value, sent.data() + i * sizeof(value), sizeof(value));
                    sums[i] += value;
                  }
                }
              });
}

ncclResult_t ncclAllGather(const void* send, void* receive, std::size_t count, ncclDataType_t,
                           ncclComm_t communicator, cudaStream_t stream) {
  const std::size_t all = count * static_cast<std::size_t>(communicator->clique->size);
  return meet("ncclAllGather", say("all-gather", count), send, count, receive, all, communicator, stream,
              [=](const Meeting& meeting) {
                for (const auto& [rank, sent] : meeting.sent) {
                  std::memcpy(static_cast<std::byte*>(receive) + static_cast<std::size_t>(rank) * count,
                              sent.data(), count);
                }
              });
}

ncclResult_t ncclBroadcast(const void* send, void* receive, std::size_t count, ncclDataType_t, int root,
                           ncclComm_t communicator, cudaStream_t stream) {
  const bool sends = communicator->rank == root;
  return meet("ncclBroadcast", say("broadcast", count, root), sends ? send : nullptr, sends ? count : 0,
              receive, count, communicator, stream, [=](const Meeting& meeting) {
                const auto sent = meeting.sent.find(root);
                if (sent != meeting.sent.end()) std::memcpy(receive, sent->second.data(), count);
              });
}

ncclResult_t ncclSend(const void* send, std::size_t count, ncclDataType_t, int peer, ncclComm_t communicator,
                      cudaStream_t stream) {
  return mail("ncclSend", send, nullptr, count, peer, communicator, stream);
}
ncclResult_t ncclRecv(void* receive, std::size_t count, ncclDataType_t, int peer, ncclComm_t communicator,
                      cudaStream_t stream) {
  return mail("ncclRecv", nullptr, receive, count, peer, communicator, stream);
}

}  // extern "C"

// ---- for tests

namespace holdfast::stand_in {

void reset() {
  World& w = world();
  Lock lock(w.mutex);
  for (const auto& [data, allocation] : w.memory) std::free(data);
  w.memory.clear();
  w.faults.clear();
  w.calls.clear();
  w.streams.clear();
  w.communicators.clear();
  w.cliques.clear();
  w.misuse.clear();
  w.callers_streams.clear();
  w.late = 0;
  w.released = false;
}

void inject(const Fault& fault) {
  Lock lock(world().mutex);
  world().faults.push_back(fault);
}

void answer_late(int polls) {
  Lock lock(world().mutex);
  world().late = polls;
}

void release() {
  Lock lock(world().mutex);
  world().released = true;
  world().changed.notify_all();
}

std::map<std::string, int> calls(int rank) {
  Lock lock(world().mutex);
  return world().calls[rank];
}

int calls(int rank, const std::string& function) { return calls(rank)[function]; }

std::size_t held() {
  World& w = world();
  Lock lock(w.mutex);
  std::size_t count = 0;
  for (const auto& [data, allocation] : w.memory) count += allocation.owner < 0 ? 1 : 0;
  for (const auto& communicator : w.communicators)
    count += communicator->ended || communicator->callers ? 0 : 1;
  for (const auto& stream : w.streams) {
    const bool ours = std::ranges::find(w.callers_streams, stream.get()) == w.callers_streams.end();
    count += ours && !stream->destroyed ? 1 : 0;
  }
  return count;
}

std::vector<std::string> misuse() {
  Lock lock(world().mutex);
  return world().misuse;
}

cudaStream_t make_stream(int device) {
  World& w = world();
  Lock lock(w.mutex);
  w.streams.push_back(std::make_unique<CUstream_st>());
  w.streams.back()->device = device;
  w.callers_streams.push_back(w.streams.back().get());
  return w.streams.back().get();
}

std::uint64_t* make_lanes(int device) {
  Lock lock(world().mutex);
  auto* data = static_cast<std::byte*>(std::calloc(1, sizeof(Record)));
  world().memory[data] = {sizeof(Record), false, device};
  return reinterpret_cast<std::uint64_t*>(data);
}

ncclComm* make_communicator(const std::string& name, int rank, int size) {
  Lock lock(world().mutex);
  auto& clique = world().cliques[name];
  if (!clique) clique = std::make_shared<Clique>();
  clique->size = size;
  clique->arrived.insert(rank);
  ncclComm* made = add_communicator(clique, rank);
  made->callers = true;
  return made;
}

void drain() {
  Lock lock(world().mutex);
  pump();
}

}  // namespace holdfast::stand_in
