// A rank's record in device memory, filled from the scan's results where they are: on a clean attempt nothing
// is read back before the collective. The header needs no CUDA; the target is holdfast::scan_cuda.
#pragma once

#include <cstdint>
#include <memory>

#include "holdfast/collectives/record.h"
#include "holdfast/collectives/status.h"

struct CUstream_st;  // what a cudaStream_t points to

namespace holdfast {

class CudaScanPlan;

// On a clean stream of an attempt: plan->launch(), upload(), add(), then NcclCollective::reduce_on(). All of
// it can be captured in a CUDA graph. Local; one thread at a time.
class CudaRecord {
 public:
  // Of rank `rank`, on the current device. Allocates: not while a stream is captured. A CUDA call that fails
  // is INTERNAL, here and below.
  static Status create(int rank, std::unique_ptr<CudaRecord>* out);
  ~CudaRecord();  // what was enqueued must have ended
  CudaRecord(const CudaRecord&) = delete;
  CudaRecord& operator=(const CudaRecord&) = delete;

  // What the host has to say in this attempt, in pinned memory: set_participant() at least. Read when the
  // stream comes to upload(), so it must not change in between.
  Record& host();

  // Enqueues the copy of host() over device_lanes().
  Status upload(CUstream_st* stream);

  // Enqueues what the latest launch of `plan` counted, as stage `stage`: its values by class, saturating as
  // Record::add_bad() does, and that this rank is bad if there are any (but at stages reduction and
  // optimizer).
  Status add(CUstream_st* stream, Stage stage, const CudaScanPlan& plan);

  // In device memory, Record::kLanes numbers.
  std::uint64_t* device_lanes() const;

 private:
  struct Impl;
  explicit CudaRecord(std::unique_ptr<Impl> impl);
  const std::unique_ptr<Impl> impl_;
};

}  // namespace holdfast
