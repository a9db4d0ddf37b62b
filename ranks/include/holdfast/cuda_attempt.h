// An attempt on a GPU under StepGuard: record, verdict and update follow each other on one stream, and the
// host reads nothing back while all is clean. The header needs neither CUDA nor NCCL; the target is
// holdfast::nccl_guard.
//
//   CudaAttempt::create(collective, stream, &device);     the NcclCollective is the guard's, too
//   device->add_scan(Stage::kBackward, tensors, &gradients);
//   device->set_update([&](const std::uint32_t* skip_flag) { ... enqueue; return Status(); });
//
//   guard->begin();                                       each attempt
//   ... forward and backward on the stream ...
//   device->scan(gradients);
//   ... the gradients' all-reduce on the stream ...
//   const Decision decision = guard->decide(*device);     enqueues the rest, and waits for the verdict
//   if (decision.apply()) guard->update([&] { ... });     the host's part: schedule, counters
//   guard->finish();
//
// On the stream, in this order: the scans, where the trainer puts them; the host's record; what the scans
// counted; the sum; the skip flag; the update. Kernels of the update look at the flag and do nothing when it
// is not 0. (Multiplying by zero would not do: 0 x NaN is NaN.)
//
// The flag is up whenever the decision is not APPLY: both are judged from the same sum, and what only the
// host knows, such as an exception, a fired rule or an operator's stop, is in its record before the sum. From
// a sum that cannot be enqueued until the next one the flag is up, too, and no update is enqueued behind it.
// There is one exception, Decision::agreed == false after a sum that was clean: a rank went missing right
// then, the update may have run, and the device's state is void, as any state newer than the last checkpoint
// is.
//
// Nothing on the host may advance before decide() has returned APPLY: not the schedule, not counters, not
// what the next attempt's kernels are given. The update may still be running then: what comes next belongs on
// the same stream.
//
// Not supported: verdicts that are read late, with several attempts on their way (StepGuard's position, loss
// scale and budgets are those of one attempt at a time); a loss scale inside a graph, unless it is read from
// device memory (it changes in finish()). `check_update: AFTER` does not see what the update wrote on the
// device: with BEFORE, scan the prospective values at stage optimizer. Protected buffers and registered state
// are in host memory.
//
// It has not been run on a GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "holdfast/collectives/nccl_collective.h"
#include "holdfast/device_attempt.h"

struct CUstream_st;  // what a cudaStream_t points to

namespace holdfast {

class CudaRecord;
class CudaScanPlan;

// A contiguous tensor in device memory, or a piece that begins at element `offset` of it, such as
// StepGuard::share() gives.
struct CudaTensor {
  std::string name;
  TensorView view;
  std::int64_t offset = 0;
};

// Used by one thread, on which the rank's device is current. A CUDA call that fails is INTERNAL.
class CudaAttempt final : public DeviceAttempt {
 public:
  // Enqueues the update, which is to do nothing when the number at `skip_flag`, in device memory, is not 0. A
  // failure or an exception counts as that of an update that was applied: replicas may differ, and the next
  // attempt says so.
  using Update = std::function<Status(const std::uint32_t* skip_flag)>;

  // Local. `collective` and `stream` stay the caller's and must outlive this; nobody else calls reduce_on()
  // and wait(), of which each belongs to one attempt. Allocates.
  static Status create(NcclCollective& collective, CUstream_st* stream, std::unique_ptr<CudaAttempt>* out);
  ~CudaAttempt() override;  // what was enqueued must have ended

  // Local, before the first attempt: tensors to be scanned together in each attempt, their memory as
  // CudaScanPlan::create() wants it. `index` is for scan(). Allocates, and waits for the device.
  Status add_scan(Stage stage, std::span<const CudaTensor> tensors, std::size_t* index);
  // Without one the host runs the update, after APPLY.
  void set_update(Update update) { update_ = std::move(update); }

  // Enqueues a scan: when the tensors are written, and before they are overwritten. Each of them, once an
  // attempt. One that is left out, or whose launch failed, is an error of this rank (and not only unseen),
  // but for an attempt in which the host reports an error anyway.
  void scan(std::size_t index);

  // Local, to be captured in a CUDA graph behind the scans, and whatever else of the attempt: enqueues all
  // that sum() does, from the record to the update. Not while a sum is unread. When it fails, such as for a
  // scan that is missing or an update that cannot be enqueued, what was captured must not be launched.
  Status enqueue();
  // Of the same on every rank: from now on sum() calls `launch`, which launches such a graph, and expects no
  // scan(). A graph that cannot be launched on one rank ends the attempts of all (RANK_MISSING): the others
  // may be waiting in a collective of it.
  void replay(std::function<Status()> launch) { launch_ = std::move(launch); }

  int rank() const override { return collective_.rank(); }
  int size() const override { return collective_.size(); }
  // RANK_MISSING, for good, when the sum fails.
  Status sum(Record* record) override;
  // Waits for the stream.
  Status measured(std::vector<DeviceMeasurement>* out) override;
  Status update_status() const override { return update_status_; }

 private:
  struct Scan;
  CudaAttempt(NcclCollective& collective, CUstream_st* stream);
  Status missed_scan();
  Status enqueue_sum();
  Status enqueue_update();
  Status replay_graph();
  Status take_part(Record* record);

  NcclCollective& collective_;
  CUstream_st* const stream_;
  std::unique_ptr<CudaRecord> record_;
  std::vector<std::unique_ptr<Scan>> scans_;
  Update update_;
  std::function<Status()> launch_;
  Status scan_error_;     // of a scan that could not be launched, until sum()
  Status error_;          // of this rank, in the latest sum
  Status update_status_;  // likewise
  Status failure_;        // of a sum, for good
};

}  // namespace holdfast
