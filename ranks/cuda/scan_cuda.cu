#include "holdfast/scan_cuda.h"

#include <cuda_runtime.h>

#include <cassert>
#include <cstring>
#include <string>
#include <vector>

#include "scan_lanes.h"
#include "scan_plan.h"

namespace holdfast {
namespace cuda {
namespace {

constexpr unsigned kWarp = 0xffffffffu;
static_assert(kStrands == 32, "a warp sums one strand in each thread");

// What the tiles of one tensor add to. Between launches `first_bad` is kNone, the rest zero: the tile that is
// last takes everything out, so that the next launch needs no preparation.
struct Accumulators {
  unsigned long long nan = 0;
  unsigned long long pos_inf = 0;
  unsigned long long neg_inf = 0;
  unsigned long long first_bad = kNone;
  unsigned long long abs_max = 0;  // as bits, which compare as the doubles do
  unsigned arrived = 0;            // tiles
};

struct Totals {
  unsigned skip_flag = 0;
  unsigned bad = 0;       // likewise zero between launches
  unsigned finished = 0;  // tensors
};

// Everything in device memory.
struct Tables {
  const PlannedTensor* tensors;
  const std::uint32_t* tile_tensor;
  CudaProbe* results;
  Accumulators* accumulators;
  Totals* totals;
  double* sums;  // of chunks: three arrays, small, medium and large
  std::int64_t chunks;
  std::uint32_t scanned;
};

// Part of a warp; other parts may be elsewhere in the program.
template <class Type>
class WarpGroup {
 public:
  __device__ WarpGroup() {
    constexpr int kThreads = Geometry<Type>::kGroupThreads;
    me_.index = static_cast<int>(threadIdx.x) % kThreads;
    mask_ = ((1u << kThreads) - 1) << (threadIdx.x % 32 - static_cast<unsigned>(me_.index));
  }
  template <class F>
  __device__ void each(F f) {
    f(me_);
  }
  __device__ void add_across(int distance) { add(me_.sums, distance); }
  __device__ void add_wide_across(int distance) { add(me_.wide, distance); }
  __device__ typename Type::Top top() {
    for (int d = Geometry<Type>::kGroupThreads / 2; d > 0; d /= 2) {
      me_.top = Type::larger(me_.top, __shfl_xor_sync(mask_, me_.top, d));
    }
    return me_.top;
  }
  __device__ const Findings& findings() const { return me_.findings; }

 private:
  template <class T, int kCount>
  __device__ void add(T (&lanes)[kCount], int distance) {
    for (int j = 0; j < kCount; ++j) lanes[j] += __shfl_xor_sync(mask_, lanes[j], distance);
  }

  unsigned mask_;
  Thread<Type> me_;
};

// By all threads of a block. The sums of the tile's chunks go to where finish_tensor() finds them.
template <class Type, bool kComplex>
__device__ Findings scan_tile(const Tables& tables, const PlannedTensor& tensor, std::int64_t tile,
                              Accumulators& all, BlockResult* blocks) {
  using G = Geometry<Type>;
  const int group_index = static_cast<int>(threadIdx.x) / G::kGroupThreads;
  const std::int64_t begin = tile * G::kTile + group_index * G::kBlock;
  const std::int64_t left = tensor.parts - begin;
  BlockResult result;
  WarpGroup<Type> group;
  if (left > 0) {
    const auto* data = static_cast<const typename G::Bits*>(tensor.data) + begin;
    const int count = left < G::kBlock ? static_cast<int>(left) : G::kBlock;
    result = scan_block<Type, kComplex>(group, data, count, tensor.aligned != 0,
                                        static_cast<std::uint64_t>(begin));
  }
  if (threadIdx.x % G::kGroupThreads == 0) blocks[group_index] = result;
  __syncthreads();
  const std::int64_t chunk = tile * G::kChunks + threadIdx.x;
  if (threadIdx.x < G::kChunks && chunk < tensor.chunks) {
    const BlockResult sum = add_blocks(blocks + threadIdx.x * kBlocksPerChunk);
    double* out = tables.sums + tensor.first_chunk + chunk;
    out[0] = sum.squares.small;
    out[tables.chunks] = sum.squares.medium;
    out[2 * tables.chunks] = sum.squares.large;
    atomicMax(&all.abs_max, bits_of(sum.abs_max));
  }
  return group.findings();
}

__device__ void add_findings(const Findings& found, Accumulators& all) {
  if (!__any_sync(kWarp, found.first != kNone)) return;
  const unsigned nan = __reduce_add_sync(kWarp, found.nan);
  const unsigned pos_inf = __reduce_add_sync(kWarp, found.pos_inf);
  const unsigned neg_inf = __reduce_add_sync(kWarp, found.neg_inf);
  unsigned long long first = found.first;
  for (int d = 16; d > 0; d /= 2) {
    const unsigned long long other = __shfl_xor_sync(kWarp, first, d);
    if (other < first) first = other;
  }
  if (threadIdx.x % 32 != 0) return;
  atomicAdd(&all.nan, nan);
  atomicAdd(&all.pos_inf, pos_inf);
  atomicAdd(&all.neg_inf, neg_inf);
  atomicMin(&all.first_bad, first);
}

// By a warp: strand s is the thread's, chunks s, s + kStrands, ... in order. Read from L2, where other
// multiprocessors' writes are, several ahead.
__device__ double sum_strands(const double* sums, std::int64_t chunks) {
  constexpr int kAhead = 16;
  double sum = 0;
  std::int64_t c = threadIdx.x % 32;
  for (; c + (kAhead - 1) * kStrands < chunks; c += kAhead * kStrands) {
    double values[kAhead];
    for (int a = 0; a < kAhead; ++a) values[a] = __ldcg(sums + c + a * kStrands);
    for (int a = 0; a < kAhead; ++a) sum += values[a];
  }
  for (; c < chunks; c += kStrands) sum += __ldcg(sums + c);
  for (int half = kStrands / 2; half > 0; half /= 2) sum += __shfl_xor_sync(kWarp, sum, half);
  return sum;
}

// By one thread: takes out what the tiles added, and, in the last tensor of all, tells the flag.
__device__ void take_findings(const Tables& tables, Accumulators& all, CudaProbe& result) {
  result.nan = atomicExch(&all.nan, 0ull);
  result.pos_inf = atomicExch(&all.pos_inf, 0ull);
  result.neg_inf = atomicExch(&all.neg_inf, 0ull);
  const unsigned long long first = atomicExch(&all.first_bad, kNone);
  result.first_bad = static_cast<std::int64_t>(first);  // kNone is -1
  result.abs_max = as_double(atomicExch(&all.abs_max, 0ull));
  Totals& totals = *tables.totals;
  if (first != kNone) atomicOr(&totals.bad, 1u);
  __threadfence();
  if (atomicInc(&totals.finished, tables.scanned - 1) == tables.scanned - 1) {
    totals.skip_flag = atomicExch(&totals.bad, 0u);
  }
}

// By the block whose tile is the tensor's last to be scanned.
__device__ void finish_tensor(const Tables& tables, const PlannedTensor& tensor, Accumulators& all,
                              CudaProbe& result) {
  const unsigned warp = threadIdx.x / 32;
  if (warp < 3) {
    const double sum = sum_strands(tables.sums + warp * tables.chunks + tensor.first_chunk, tensor.chunks);
    if (threadIdx.x % 32 == 0) (&result.small)[warp] = sum;
  } else if (threadIdx.x % 32 == 0) {
    take_findings(tables, all, result);
  }
}
static_assert(kTileThreads == 4 * 32);

// A thread block is a tile. 64 registers a thread are 1024 threads on a multiprocessor, and with eight packs
// on their way to each of them 128 KiB.
__global__ void __launch_bounds__(kTileThreads, 8) scan_tiles(Tables tables) {
  __shared__ BlockResult blocks[kTileThreads / 4];
  __shared__ bool last;
  const std::uint32_t index = tables.tile_tensor[blockIdx.x];
  const PlannedTensor tensor = tables.tensors[index];
  Accumulators& all = tables.accumulators[index];
  Findings found;
  with_type(tensor.dtype, [&]<class Type, bool kComplex>() {
    static_assert(Geometry<Type>::kGroups <= kTileThreads / 4);
    found = scan_tile<Type, kComplex>(tables, tensor, blockIdx.x - tensor.first_tile, all, blocks);
  });
  add_findings(found, all);

  __threadfence();  // what this tile wrote is seen by who sees it counted
  __syncthreads();
  if (threadIdx.x == 0) last = atomicInc(&all.arrived, tensor.tiles - 1) == tensor.tiles - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  finish_tensor(tables, tensor, all, tables.results[index]);
}

Status check(cudaError_t code, const char* call) {
  if (code == cudaSuccess) return Status::ok_status();
  return Status::internal(std::string(call) + ": " + cudaGetErrorString(code) + " (" +
                          cudaGetErrorName(code) + ")");
}

// The tables as one piece of memory, copied to the device at once.
class Image {
 public:
  // The offset of `count` objects, with their bytes.
  template <class T>
  std::size_t add(const T* objects, std::size_t count) {
    const std::size_t offset = reserve(bytes_.size(), count * sizeof(T));
    if (count > 0) std::memcpy(bytes_.data() + offset, objects, count * sizeof(T));
    return offset;
  }
  const std::vector<std::byte>& bytes() const { return bytes_; }

 private:
  static constexpr std::size_t kAlignment = 256;
  std::size_t reserve(std::size_t end, std::size_t size) {
    const std::size_t offset = (end + kAlignment - 1) / kAlignment * kAlignment;
    bytes_.resize(offset + size);
    return offset;
  }
  std::vector<std::byte> bytes_;
};

}  // namespace
}  // namespace cuda

struct CudaScanPlan::Impl {
  ~Impl() { static_cast<void>(cudaFree(memory)); }  // nothing can be done about an error here

  Status upload(const cuda::ScanPlan& plan);

  void* memory = nullptr;
  std::uint32_t tiles = 0;
  std::size_t tensors = 0;
  cuda::Tables tables = {};
};

Status CudaScanPlan::Impl::upload(const cuda::ScanPlan& plan) {
  using namespace cuda;
  tensors = plan.tensors.size();
  tiles = static_cast<std::uint32_t>(plan.tile_tensor.size());
  tables.chunks = plan.chunks;
  tables.scanned = plan.scanned;

  const std::vector<Accumulators> accumulators(tensors);
  const Totals totals = {};
  Image image;
  const std::size_t tensors_at = image.add(plan.tensors.data(), tensors);
  const std::size_t tiles_at = image.add(plan.tile_tensor.data(), tiles);
  const std::size_t results_at = image.add(plan.results.data(), tensors);
  const std::size_t accumulators_at = image.add(accumulators.data(), tensors);
  const std::size_t totals_at = image.add(&totals, 1);
  const std::size_t sums_at = image.add<double>(nullptr, 0);
  const std::size_t sums_size = 3 * static_cast<std::size_t>(plan.chunks) * sizeof(double);

  Status status = check(cudaMalloc(&memory, sums_at + sums_size), "cudaMalloc");
  if (!status.ok()) return status;
  const auto& bytes = image.bytes();
  status = check(cudaMemcpy(memory, bytes.data(), bytes.size(), cudaMemcpyHostToDevice), "cudaMemcpy");
  if (!status.ok()) return status;
  // Kernels are loaded when they are first used, which a capture may not allow for.
  cudaFuncAttributes unused;
  status = check(cudaFuncGetAttributes(&unused, reinterpret_cast<const void*>(scan_tiles)),
                 "cudaFuncGetAttributes");
  if (!status.ok()) return status;
  // A copy from pageable memory may return before it has arrived; a launch may be on any stream.
  status = check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  auto* base = static_cast<std::byte*>(memory);
  tables.tensors = reinterpret_cast<const PlannedTensor*>(base + tensors_at);
  tables.tile_tensor = reinterpret_cast<const std::uint32_t*>(base + tiles_at);
  tables.results = reinterpret_cast<CudaProbe*>(base + results_at);
  tables.accumulators = reinterpret_cast<Accumulators*>(base + accumulators_at);
  tables.totals = reinterpret_cast<Totals*>(base + totals_at);
  tables.sums = reinterpret_cast<double*>(base + sums_at);
  return status;
}

Status CudaScanPlan::create(std::span<const TensorView> tensors, std::unique_ptr<CudaScanPlan>* plan) {
  cuda::ScanPlan host;
  Status status = cuda::plan_scan(tensors, &host);
  if (!status.ok()) return status;
  auto impl = std::make_unique<Impl>();
  status = impl->upload(host);
  if (status.ok()) plan->reset(new CudaScanPlan(std::move(impl)));
  return status;
}

CudaScanPlan::CudaScanPlan(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
CudaScanPlan::~CudaScanPlan() = default;

Status CudaScanPlan::launch(CUstream_st* stream) {
  if (impl_->tiles == 0) return Status::ok_status();  // the results are there, and the flag is 0
  void* arguments[] = {&impl_->tables};
  return cuda::check(cudaLaunchKernel(reinterpret_cast<const void*>(cuda::scan_tiles), dim3(impl_->tiles),
                                      dim3(cuda::kTileThreads), arguments, 0, stream),
                     "cudaLaunchKernel");
}

Status CudaScanPlan::copy_results(CUstream_st* stream, std::span<CudaProbe> host) const {
  assert(host.size() == impl_->tensors);
  if (host.empty()) return Status::ok_status();
  return cuda::check(
      cudaMemcpyAsync(host.data(), impl_->tables.results, host.size_bytes(), cudaMemcpyDeviceToHost, stream),
      "cudaMemcpyAsync");
}

std::size_t CudaScanPlan::size() const { return impl_->tensors; }
const CudaProbe* CudaScanPlan::device_results() const { return impl_->tables.results; }
const std::uint32_t* CudaScanPlan::device_skip_flag() const { return &impl_->tables.totals->skip_flag; }

}  // namespace holdfast
