// What the stand-ins of CUDA and of NCCL share: one world, behind one lock that is held for moments.
#pragma once

#include <nccl.h>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "collectives/nccl_stand_in.h"

struct CUstream_st {
  int device = 0;
  bool destroyed = false;
  std::deque<std::function<bool()>> work;  // true when done
};

namespace holdfast::stand_in {

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

}  // namespace holdfast::stand_in

struct ncclComm {
  std::shared_ptr<holdfast::stand_in::Clique> clique;
  int rank = 0;
  const char* in_call = nullptr;  // which; of two at once the later
  bool aborting = false;
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

namespace holdfast::stand_in {

struct Allocation {
  std::size_t bytes = 0;
  bool pinned = false;
  int owner = -1;  // the device, of a caller's
};

struct World {
  ~World() { free_memory(); }
  void free_memory();  // also what callers left, who do not own it

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
  int held_back = 0;
};

World& world();
extern thread_local int current_device;

using Lock = std::unique_lock<std::mutex>;

// All that follow are called with the lock held.
void complain(const std::string& what);
// Counts the call as the rank's, and says what is to go wrong with it. Waits here if it is to.
std::optional<Kind> enter(Lock& lock, const char* function, int rank = current_device);
bool inside(const void* data, std::size_t bytes, bool pinned);
bool usable(cudaStream_t stream, const char* function);
void pump();  // works all streams off as far as they go
ncclComm_t add_communicator(std::shared_ptr<Clique> clique, int rank);

}  // namespace holdfast::stand_in
