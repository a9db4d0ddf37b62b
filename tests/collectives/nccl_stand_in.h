// The CUDA and NCCL calls that the NCCL backend makes, on a CPU and with ranks as threads of one process: the
// backend is compiled against the real headers and linked with this. A rank's device has the rank's number,
// so that the thread's current device tells whose call it is. Streams are queues, worked off whenever anybody
// asks how far one is. A call of NCCL's is whose communicator it is, whichever thread makes it; what the
// ranks share is locked for moments only, so that other threads' calls, an abort among them, can meet it in
// the middle. It knows when a call is made that must not be made, or not then.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <cuda_runtime_api.h>

struct ncclComm;

namespace holdfast::stand_in {

enum class Kind {
  kError,           // the call returns an error, and does nothing but what frees
  kAsyncError,      // of ncclCommGetAsyncError: it works, and tells of an error from now on
  kNeverCompletes,  // of a collective: it is enqueued, and never done until it is aborted
  kDwells,          // stays inside before release(), and then works
  kNeverReturns     // before release()
};

struct Fault {
  std::string function;
  int rank = 0;
  int call = 1;  // of this rank, from 1
  Kind kind = Kind::kError;
};

void reset();  // a world without faults and without history
void inject(const Fault& fault);
void answer_late(int polls);  // NCCL's calls are in progress until they were polled so often
void release();
int held_back();  // calls that wait for release()

std::map<std::string, int> calls(int rank);  // how often it called what
int calls(int rank, const std::string& function);
std::size_t held();                 // allocations, streams and communicators that were not given back
std::vector<std::string> misuse();  // calls that must not be made, in words

// For a caller's own side.
cudaStream_t make_stream(int device);
std::uint64_t* make_lanes(int device);  // a record in device memory
// A caller's communicator, there at once.
::ncclComm* make_communicator(const std::string& name, int rank, int size);
void drain();  // works the streams off as far as they go

}  // namespace holdfast::stand_in
