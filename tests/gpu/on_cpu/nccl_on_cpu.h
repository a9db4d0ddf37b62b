// NCCL on a CPU, as the header beside this file is CUDA: each call is over when it returns. Ranks are
// processes of mpirun with HOLDFAST_ON_CPU_MPI, threads otherwise. Knows nothing of faults: those are tested
// over tests/collectives/nccl_stand_in.h. For one file of a program.
#pragma once

#include "gpu/on_cpu/cuda_runtime.h"

#include <nccl.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>

#ifdef HOLDFAST_ON_CPU_MPI
#include <mpi.h>
#endif

namespace on_cpu {

using Everybody = std::vector<std::vector<char>>;  // what each rank sent

// The threads that got the same id.
struct Clique {
  std::mutex mutex;
  std::condition_variable changed;
  int size = 0;
  int arrived = 0;
  long number = 0;
  Everybody sent;
  Everybody complete;

  Everybody exchange(int rank, const void* data, std::size_t bytes) {
    std::unique_lock lock(mutex);
    sent.resize(static_cast<std::size_t>(size));
    const char* begin = static_cast<const char*>(data);
    sent[static_cast<std::size_t>(rank)].assign(begin, begin + bytes);
    const long mine = number;
    if (++arrived == size) {
      arrived = 0;
      ++number;
      complete = sent;
      changed.notify_all();
    } else {
      changed.wait(lock, [&] { return number != mine; });
    }
    return complete;  // of this meeting: for the next one, this rank would have to come again
  }
};

inline Clique& clique_of(const std::string& id) {
  static std::mutex mutex;
  static std::map<std::string, std::unique_ptr<Clique>> cliques;
  const std::lock_guard lock(mutex);
  std::unique_ptr<Clique>& clique = cliques[id];
  if (!clique) clique = std::make_unique<Clique>();
  return *clique;
}

}  // namespace on_cpu

struct ncclComm {
  int rank;
  int size;
  on_cpu::Clique* clique;

  on_cpu::Everybody exchange(const void* data, std::size_t bytes) const {
#ifdef HOLDFAST_ON_CPU_MPI
    const int count = static_cast<int>(bytes);
    std::vector<char> all(bytes * static_cast<std::size_t>(size));
    MPI_Allgather(data, count, MPI_CHAR, all.data(), count, MPI_CHAR, MPI_COMM_WORLD);
    on_cpu::Everybody everybody;
    for (auto at = all.begin(); at != all.end(); at += count) everybody.emplace_back(at, at + count);
    return everybody;
#else
    return clique->exchange(rank, data, bytes);
#endif
  }
};

namespace on_cpu {

// In the order of the ranks, so the bits are the same on each.
template <class T>
void add_up(const Everybody& all, std::size_t count, void* out) {
  std::vector<T> sum(count);
  for (const auto& sent : all) {
    for (std::size_t i = 0; i < count; ++i) sum[i] += reinterpret_cast<const T*>(sent.data())[i];
  }
  std::memcpy(out, sum.data(), count * sizeof(T));
}

}  // namespace on_cpu

extern "C" {

const char* ncclGetErrorString(ncclResult_t) { return ""; }
const char* ncclGetLastError(ncclComm_t) { return ""; }

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  static int made = 0;
  *id = {};
  std::snprintf(id->internal, sizeof(id->internal), "%d", ++made);
  return ncclSuccess;
}
ncclResult_t ncclCommInitRank(ncclComm_t* out, int size, ncclUniqueId id, int rank) {
  *out = new ncclComm{rank, size, &on_cpu::clique_of(id.internal)};
  const std::lock_guard lock((*out)->clique->mutex);
  (*out)->clique->size = size;
  return ncclSuccess;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* out, int size, ncclUniqueId id, int rank, ncclConfig_t*) {
  return ncclCommInitRank(out, size, id, rank);
}
ncclResult_t ncclCommSplit(ncclComm_t, int, int, ncclComm_t*, ncclConfig_t*) { return ncclInvalidUsage; }
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* state) { return *state = ncclSuccess; }
ncclResult_t ncclCommCount(ncclComm_t communicator, int* count) {
  return *count = communicator->size, ncclSuccess;
}
ncclResult_t ncclCommUserRank(ncclComm_t communicator, int* rank) {
  return *rank = communicator->rank, ncclSuccess;
}
ncclResult_t ncclCommCuDevice(ncclComm_t communicator, int* device) {
  return *device = communicator->rank, ncclSuccess;
}
ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }
ncclResult_t ncclCommDestroy(ncclComm_t communicator) { return delete communicator, ncclSuccess; }
ncclResult_t ncclCommAbort(ncclComm_t communicator) { return ncclCommDestroy(communicator); }

ncclResult_t ncclAllReduce(const void* send, void* receive, std::size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t communicator, cudaStream_t stream) {
  if (op != ncclSum || (type != ncclFloat && type != ncclUint64)) return ncclInvalidArgument;
  submit(stream, [=] {
    const bool floats = type == ncclFloat;
    const on_cpu::Everybody all = communicator->exchange(send, count * (floats ? 4 : 8));
    if (floats) on_cpu::add_up<float>(all, count, receive);
    if (!floats) on_cpu::add_up<std::uint64_t>(all, count, receive);
  });
  return ncclSuccess;
}
ncclResult_t ncclAllGather(const void* send, void* receive, std::size_t count, ncclDataType_t,
                           ncclComm_t communicator, cudaStream_t) {
  char* to = static_cast<char*>(receive);
  for (const auto& sent : communicator->exchange(send, count)) to = std::copy(sent.begin(), sent.end(), to);
  return ncclSuccess;
}
ncclResult_t ncclBroadcast(const void* send, void* receive, std::size_t count, ncclDataType_t, int root,
                           ncclComm_t communicator, cudaStream_t) {
  const on_cpu::Everybody all = communicator->exchange(send, count);
  std::memcpy(receive, all[static_cast<std::size_t>(root)].data(), count);
  return ncclSuccess;
}
#ifdef HOLDFAST_ON_CPU_MPI
ncclResult_t ncclSend(const void* send, std::size_t count, ncclDataType_t, int peer, ncclComm_t,
                      cudaStream_t) {
  MPI_Send(send, static_cast<int>(count), MPI_CHAR, peer, 0, MPI_COMM_WORLD);
  return ncclSuccess;
}
ncclResult_t ncclRecv(void* receive, std::size_t count, ncclDataType_t, int peer, ncclComm_t, cudaStream_t) {
  MPI_Recv(receive, static_cast<int>(count), MPI_CHAR, peer, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
  return ncclSuccess;
}
#else
ncclResult_t ncclSend(const void*, std::size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t) {
  return ncclInvalidUsage;
}
ncclResult_t ncclRecv(void*, std::size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t) {
  return ncclInvalidUsage;
}
#endif

}  // extern "C"
