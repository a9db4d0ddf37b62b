#include <algorithm>
#include <cstring>
#include <thread>

#include "collectives/stand_in_world.h"

using namespace holdfast::stand_in;

namespace {

// A call on a communicator, from its beginning to its end. The world's lock is let go of in the middle.
class Call {
 public:
  Call(ncclComm_t communicator, const char* function)
      : lock_(world().mutex), communicator_(communicator), name_(function) {
    if (communicator_ != nullptr && communicator_->in_call != nullptr) {
      complain(name_ + " while another thread is in " + communicator_->in_call);
    }
    if (communicator_ != nullptr) communicator_->in_call = function;
    fault_ = enter(lock_, function, communicator_ == nullptr ? current_device : communicator_->rank);
    lock_.unlock();
    std::this_thread::yield();
    lock_.lock();
  }
  ~Call() {
    if (communicator_ != nullptr) communicator_->in_call = nullptr;
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  std::optional<Kind> fault() const { return fault_; }

 private:
  Lock lock_;  // while this is there, but for the middle
  const ncclComm_t communicator_;
  const std::string name_;
  std::optional<Kind> fault_;
};

bool usable(ncclComm_t communicator, const char* function) {
  if (communicator == nullptr) {
    complain(std::string(function) + " without a communicator");
    return false;
  }
  if (communicator->aborting) complain(std::string(function) + " on a communicator that is being aborted");
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

using Read = std::function<void(const Meeting&)>;

// A collective over all ranks: everybody leaves a copy of `send`, and reads when all did.
ncclResult_t meet(const char* function, const std::string& what, const void* send, std::size_t sent,
                  void* receive, std::size_t received, ncclComm_t communicator, cudaStream_t stream,
                  const Read& read) {
  const Call call(communicator, function);
  const auto fault = call.fault();
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
  const Call call(communicator, function);
  const auto fault = call.fault();
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
  const Call call(parent, "ncclCommSplit");
  if (call.fault()) return ncclSystemError;
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
  const Call call(communicator, "ncclCommGetAsyncError");
  const auto fault = call.fault();
  if (communicator == nullptr || communicator->ended || communicator->aborting) {
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
    const Call call(communicator, #function);                      \
    if (call.fault()) return ncclSystemError;                      \
    if (!usable(communicator, #function)) return ncclInvalidUsage; \
    *out = value;                                                  \
    return ncclSuccess;                                            \
  }
HOLDFAST_ASK(ncclCommCount, communicator->clique->size)
HOLDFAST_ASK(ncclCommUserRank, communicator->rank)
HOLDFAST_ASK(ncclCommCuDevice, communicator->rank)

ncclResult_t ncclCommFinalize(ncclComm_t communicator) {
  const Call call(communicator, "ncclCommFinalize");
  const auto fault = call.fault();
  if (fault) return ncclSystemError;
  if (!usable(communicator, "ncclCommFinalize")) return ncclInvalidUsage;
  const auto clique = communicator->clique;
  clique->finalizing.insert(communicator->rank);
  return begin(communicator,
               [clique] { return static_cast<int>(clique->finalizing.size()) == clique->size; });
}

ncclResult_t ncclCommDestroy(ncclComm_t communicator) {
  const Call call(communicator, "ncclCommDestroy");
  const auto fault = call.fault();
  if (!usable(communicator, "ncclCommDestroy")) return ncclInvalidUsage;
  if (!communicator->clique->finalizing.contains(communicator->rank)) complain("destroyed, not finalized");
  communicator->ended = true;
  return fault ? ncclSystemError : ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t communicator) {
  Lock lock(world().mutex);
  if (communicator == nullptr || communicator->ended || communicator->aborting) {
    complain("ncclCommAbort of an ended communicator");
    return ncclInvalidArgument;
  }
  if (communicator->in_call != nullptr) {
    complain(std::string("ncclCommAbort while another thread is in ") + communicator->in_call);
  }
  communicator->aborting = true;
  const auto fault = enter(lock, "ncclCommAbort", communicator->rank);
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
