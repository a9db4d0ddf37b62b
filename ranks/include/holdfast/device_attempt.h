// The part of an attempt that a device does by itself, as StepGuard::decide(DeviceAttempt&) sees it: it
// counts what is not finite, sums the records of all ranks, and leaves its update out by the same sum that
// the guard decides from. The header needs no CUDA; CudaAttempt of cuda_attempt.h is the one for NVIDIA's
// GPUs.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "holdfast/collectives/record.h"
#include "holdfast/collectives/status.h"
#include "holdfast/scan.h"
#include "holdfast/tensor_view.h"

namespace holdfast {

// One tensor, or a piece of it that begins at element `offset`, as the device measured it.
struct DeviceMeasurement {
  Stage stage = Stage::kInput;
  std::string tensor;
  Probe probe;
  std::int64_t offset = 0;
  DType dtype = DType::kFloat32;
};

// Of one rank, called by one thread: sum() in each attempt, then at most one of the other two. An exception
// is taken for INTERNAL.
class DeviceAttempt {
 public:
  virtual ~DeviceAttempt() = default;
  DeviceAttempt(const DeviceAttempt&) = delete;
  DeviceAttempt& operator=(const DeviceAttempt&) = delete;

  // Of the ranks whose records are summed. The guard refuses others than its own: device and host must come
  // to the same verdict.
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Collective, and the attempt's only one while all is clean. `record` holds what the host has to say, and
  // becomes the sum over all ranks of that and of what the device counted. The update is behind it on the
  // device, and must do nothing there unless judge() finds the same sum clean.
  // What goes wrong here alone is an error in this rank's record, with which it takes part all the same. A
  // failure is that of Collective::reduce(): nothing may be applied, and the attempts end.
  virtual Status sum(Record* record) = 0;

  // Local, behind a sum that is not clean: all that was scanned in this attempt, finite or not, since
  // evidence tells totals. A failure is put into this rank's report; `out` then holds what is known.
  virtual Status measured(std::vector<DeviceMeasurement>* out) = 0;

  // Local, behind a clean sum: whether the update was enqueued. A failure is that of an update after APPLY:
  // the next attempt tells every rank that replicas may differ.
  virtual Status update_status() const = 0;

 protected:
  DeviceAttempt() = default;
};

}  // namespace holdfast
