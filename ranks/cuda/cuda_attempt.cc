#include "holdfast/cuda_attempt.h"

#include <cuda_runtime_api.h>

#include <utility>

#include "caught.h"
#include "holdfast/record_cuda.h"
#include "holdfast/scan_cuda.h"

namespace holdfast {
namespace {

Status check(cudaError_t code, const char* call) {
  if (code == cudaSuccess) return Status();
  return Status::internal(std::string(call) + ": " + cudaGetErrorString(code) + " (" +
                          cudaGetErrorName(code) + ")");
}

}  // namespace

struct CudaAttempt::Scan {
  ~Scan() { static_cast<void>(cudaFreeHost(results)); }  // nothing can be done about an error here

  Stage stage = Stage::kInput;
  std::unique_ptr<CudaScanPlan> plan;
  std::vector<DeviceMeasurement> tensors;  // all but the probes
  CudaProbe* results = nullptr;            // pinned
  bool enqueued = false;                   // in the attempt that is under way
  bool summed = false;                     // in the latest sum
};

CudaAttempt::CudaAttempt(NcclCollective& collective, CUstream_st* stream)
    : collective_(collective), stream_(stream) {}
CudaAttempt::~CudaAttempt() = default;

Status CudaAttempt::create(NcclCollective& collective, CUstream_st* stream,
                           std::unique_ptr<CudaAttempt>* out) {
  std::unique_ptr<CudaAttempt> made(new CudaAttempt(collective, stream));
  Status status = CudaRecord::create(collective.rank(), &made->record_);
  if (status.ok()) *out = std::move(made);
  return status;
}

Status CudaAttempt::add_scan(Stage stage, std::span<const CudaTensor> tensors, std::size_t* index) {
  auto scan = std::make_unique<Scan>();
  scan->stage = stage;
  std::vector<TensorView> views;
  for (const CudaTensor& tensor : tensors) {
    views.push_back(tensor.view);
    scan->tensors.push_back({stage, tensor.name, {}, tensor.offset, tensor.view.dtype});
  }
  if (Status s = CudaScanPlan::create(views, &scan->plan); !s.ok()) return s;
  void* memory = nullptr;
  Status status = check(cudaMallocHost(&memory, (views.size() + 1) * sizeof(CudaProbe)), "cudaMallocHost");
  if (!status.ok()) return status;
  scan->results = static_cast<CudaProbe*>(memory);
  *index = scans_.size();
  scans_.push_back(std::move(scan));
  return Status();
}

void CudaAttempt::scan(std::size_t index) {
  Scan& scan = *scans_[index];
  Status status = scan.plan->launch(stream_);
  scan.enqueued = status.ok();
  if (scan_error_.ok()) scan_error_ = std::move(status);
}

// What is captured is not looked at again: with less than everything, all replays would seem to be clean.
Status CudaAttempt::enqueue() {
  Status status = missed_scan();
  if (status.ok()) status = enqueue_sum();
  for (const auto& scan : scans_) scan->enqueued = false;
  return status.ok() ? enqueue_update() : status;
}

Status CudaAttempt::enqueue_sum() {
  if (Status s = record_->upload(stream_); !s.ok()) return s;
  for (const auto& scan : scans_) {
    if (!scan->enqueued) continue;
    if (Status s = record_->add(stream_, scan->stage, *scan->plan); !s.ok()) return s;
  }
  return collective_.reduce_on(stream_, record_->device_lanes());
}

Status CudaAttempt::enqueue_update() {
  return update_ ? caught([&] { return update_(collective_.device_skip_flag()); }) : Status();
}

Status CudaAttempt::sum(Record* record) {
  if (!failure_.ok()) return failure_;
  update_status_ = Status();
  record_->host() = *record;
  if (launch_) {
    error_ = replay_graph();
  } else {
    error_ = record->errors() == 0 ? missed_scan() : std::exchange(scan_error_, Status());
    if (error_.ok()) error_ = enqueue_sum();
    // The other ranks act by the sum now: whatever happens here must not keep this one from reading it.
    if (error_.ok()) update_status_ = enqueue_update();
  }
  for (const auto& scan : scans_) {
    const bool enqueued = std::exchange(scan->enqueued, false);
    scan->summed = launch_ ? error_.ok() : enqueued;
  }
  failure_ = error_.ok() ? collective_.wait(record) : launch_ ? error_ : take_part(record);
  // Behind a sum that was not enqueued the flag would be that of the one before. When even this cannot be
  // enqueued, no update can.
  if (!error_.ok() || !failure_.ok()) static_cast<void>(collective_.raise_skip_flag(stream_));
  return failure_;
}

// The graph may hold more than our sum, such as that of the gradients: others would wait in it for a rank
// that joined them in ours alone.
Status CudaAttempt::replay_graph() {
  const Status launched = collective_.launch([this] { return caught(launch_); });
  if (launched.ok()) return launched;
  collective_.abort();
  return {StatusCode::kRankMissing, "the graph of the attempt was not launched: " + launched.message()};
}

// What was not looked at is not clean.
Status CudaAttempt::missed_scan() {
  if (!scan_error_.ok()) return std::exchange(scan_error_, Status());
  for (const auto& scan : scans_) {
    if (scan->enqueued) continue;
    const std::string first = scan->tensors.empty() ? "no tensor" : scan->tensors.front().tensor;
    return Status::internal("the scan of " + first +
                            " was not enqueued: scan() each of them in each attempt");
  }
  return Status();
}

// The other ranks' sum is on their streams, and on the wire it is the one that the host makes. When it is the
// communicator that failed, this tells so again.
Status CudaAttempt::take_part(Record* record) {
  record->set_error();
  record->mark_bad(rank());
  return collective_.reduce(*record);
}

Status CudaAttempt::measured(std::vector<DeviceMeasurement>* out) {
  Status status;
  for (const auto& scan : scans_) {
    const std::span<CudaProbe> results(scan->results, scan->tensors.size());
    if (status.ok() && scan->summed) status = scan->plan->copy_results(stream_, results);
  }
  if (status.ok()) status = check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  out->clear();
  for (const auto& scan : scans_) {
    for (std::size_t i = 0; status.ok() && scan->summed && i < scan->tensors.size(); ++i) {
      out->push_back(scan->tensors[i]);
      out->back().probe = to_probe(scan->results[i]);
    }
  }
  return error_.ok() ? status : error_;
}

}  // namespace holdfast
