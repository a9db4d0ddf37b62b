#include "holdfast/record_cuda.h"

#include <cuda_runtime.h>

#include <new>
#include <string>

#include "holdfast/scan_cuda.h"
#include "record_lanes.h"

namespace holdfast {
namespace cuda {
namespace {

constexpr unsigned kFillThreads = 256;

// One thread block: there are some thousand tensors.
__global__ void fill_record(const CudaProbe* probes, std::size_t count, Stage stage, int rank,
                            std::uint64_t* lanes) {
  __shared__ unsigned long long sums[kValueClassCount];
  if (threadIdx.x < kValueClassCount) sums[threadIdx.x] = 0;
  __syncthreads();
  LaneCounts mine;
  for (std::size_t i = threadIdx.x; i < count; i += kFillThreads) mine.add(probes[i]);
  for (int c = 0; c < kValueClassCount; ++c) {
    if (mine.by_class[c] != 0) atomicAdd(&sums[c], static_cast<unsigned long long>(mine.by_class[c]));
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  LaneCounts all;
  for (int c = 0; c < kValueClassCount; ++c) all.by_class[c] = sums[c];
  add_to_lanes(all, stage, rank, lanes);
}

Status check_record(cudaError_t code, const char* call) {
  if (code == cudaSuccess) return Status::ok_status();
  return Status::internal(std::string(call) + ": " + cudaGetErrorString(code) + " (" +
                          cudaGetErrorName(code) + ")");
}

}  // namespace
}  // namespace cuda

struct CudaRecord::Impl {
  ~Impl() {  // nothing can be done about an error here
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
  void* memory = nullptr;
  Status status = cuda::check_record(cudaMalloc(&memory, sizeof(Record)), "cudaMalloc");
  if (!status.ok()) return status;
  impl->lanes = static_cast<std::uint64_t*>(memory);
  status = cuda::check_record(cudaMallocHost(&memory, sizeof(Record)), "cudaMallocHost");
  if (!status.ok()) return status;
  impl->host = new (memory) Record;
  // Kernels are loaded when they are first used, which a capture may not allow for.
  cudaFuncAttributes unused;
  status =
      cuda::check_record(cudaFuncGetAttributes(&unused, reinterpret_cast<const void*>(cuda::fill_record)),
                         "cudaFuncGetAttributes");
  if (status.ok()) out->reset(new CudaRecord(std::move(impl)));
  return status;
}

CudaRecord::CudaRecord(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
CudaRecord::~CudaRecord() = default;

Record& CudaRecord::host() { return *impl_->host; }
std::uint64_t* CudaRecord::device_lanes() const { return impl_->lanes; }

Status CudaRecord::upload(CUstream_st* stream) {
  return cuda::check_record(cudaMemcpyAsync(impl_->lanes, impl_->host->lanes().data(), sizeof(Record),
                                            cudaMemcpyHostToDevice, stream),
                            "cudaMemcpyAsync");
}

Status CudaRecord::add(CUstream_st* stream, Stage stage, const CudaScanPlan& plan) {
  const CudaProbe* probes = plan.device_results();
  std::size_t count = plan.size();
  void* arguments[] = {&probes, &count, &stage, &impl_->rank, &impl_->lanes};
  return cuda::check_record(cudaLaunchKernel(reinterpret_cast<const void*>(cuda::fill_record), dim3(1),
                                             dim3(cuda::kFillThreads), arguments, 0, stream),
                            "cudaLaunchKernel");
}

}  // namespace holdfast
