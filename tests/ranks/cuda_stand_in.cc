#include "ranks/cuda_stand_in.h"

#include <cuda_runtime_api.h>

#include <new>
#include <thread>
#include <utility>
#include <vector>

#include "collectives/nccl_stand_in.h"
#include "cuda/record_lanes.h"
#include "holdfast/record_cuda.h"
#include "holdfast/scan_cuda.h"

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  cudaError_t code = cudaErrorNotReady;
  while ((code = cudaStreamQuery(stream)) == cudaErrorNotReady) std::this_thread::yield();
  return code;
}

namespace holdfast {
namespace {

Status check(cudaError_t code, const char* call) {
  return code == cudaSuccess ? Status() : Status::internal(std::string(call) + ": an injected error");
}

template <typename T>
Status allocate(cudaError_t (*call)(void**, std::size_t), std::size_t bytes, T** out) {
  void* memory = nullptr;
  Status status = check(call(&memory, bytes), "an allocation");
  *out = static_cast<T*>(memory);
  return status;
}

}  // namespace

struct CudaScanPlan::Impl {
  ~Impl() { static_cast<void>(cudaFree(results)); }
  std::vector<TensorView> views;
  CudaProbe* results = nullptr;
};

Status CudaScanPlan::create(std::span<const TensorView> tensors, std::unique_ptr<CudaScanPlan>* plan) {
  auto impl = std::make_unique<Impl>();
  impl->views.assign(tensors.begin(), tensors.end());
  Status status = allocate(cudaMalloc, (tensors.size() + 1) * sizeof(CudaProbe), &impl->results);
  if (status.ok()) plan->reset(new CudaScanPlan(std::move(impl)));
  return status;
}
CudaScanPlan::CudaScanPlan(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
CudaScanPlan::~CudaScanPlan() = default;

Status CudaScanPlan::launch(CUstream_st*) {
  if (std::exchange(stand_in::refuse_launch, false)) return Status::internal("cudaLaunchKernel: refused");
  for (std::size_t i = 0; i < impl_->views.size(); ++i) {
    const Probe probe = scan(impl_->views[i]);
    impl_->results[i] = {probe.count,         probe.bad.nan,        probe.bad.pos_inf,
                         probe.bad.neg_inf,   probe.first_bad,      probe.abs_max,
                         probe.squares.small, probe.squares.medium, probe.squares.large};
  }
  return Status();
}
Status CudaScanPlan::copy_results(CUstream_st* stream, std::span<CudaProbe> host) const {
  return check(
      cudaMemcpyAsync(host.data(), impl_->results, host.size_bytes(), cudaMemcpyDeviceToHost, stream),
      "cudaMemcpyAsync");
}
std::size_t CudaScanPlan::size() const { return impl_->views.size(); }
const CudaProbe* CudaScanPlan::device_results() const { return impl_->results; }

struct CudaRecord::Impl {
  ~Impl() {
    static_cast<void>(cudaFree(lanes));
    static_cast<void>(cudaFreeHost(host));
  }
  int rank = 0;
  std::uint64_t* lanes = nullptr;
  Record* host = nullptr;
};

Status CudaRecord::create(int rank, std::unique_ptr<CudaRecord>* out) {
  auto impl = std::make_unique<Impl>();
  impl->rank = rank;
  Status status = allocate(cudaMalloc, sizeof(Record), &impl->lanes);
  if (status.ok()) status = allocate(cudaMallocHost, sizeof(Record), &impl->host);
  if (status.ok()) new (impl->host) Record;
  if (status.ok()) out->reset(new CudaRecord(std::move(impl)));
  return status;
}
CudaRecord::CudaRecord(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
CudaRecord::~CudaRecord() = default;
Record& CudaRecord::host() { return *impl_->host; }
std::uint64_t* CudaRecord::device_lanes() const { return impl_->lanes; }

Status CudaRecord::upload(CUstream_st* stream) {
  return check(cudaMemcpyAsync(impl_->lanes, impl_->host->lanes().data(), sizeof(Record),
                               cudaMemcpyHostToDevice, stream),
               "cudaMemcpyAsync");
}

Status CudaRecord::add(CUstream_st*, Stage stage, const CudaScanPlan& plan) {
  stand_in::drain();  // up to the upload, which nothing holds back
  cuda::LaneCounts counts;
  for (std::size_t i = 0; i < plan.size(); ++i) counts.add(plan.device_results()[i]);
  cuda::add_to_lanes(counts, stage, impl_->rank, impl_->lanes);
  return Status();
}

}  // namespace holdfast
