// The scan beside a kernel that only reads and the device's own copy: medians over buffers in turn, each
// larger than the L2 cache.
#include "gpu/scan_speed.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "gpu/device_memory.h"
#include "holdfast/scan_cuda.h"

namespace holdfast {
namespace {

constexpr std::size_t kBytes = std::size_t{1} << 30;
constexpr int kBuffers = 3;
constexpr int kRuns = 30;

// Which bits of a 64-bit word are random, and which are set: finite values of a gradient's kind.
struct Kind {
  DType dtype;
  std::uint64_t random, set;
};
constexpr Kind kKinds[] = {{DType::kFloat64, 0x800fffffffffffffu, 0x3ff0000000000000u},
                           {DType::kFloat32, 0x807fffff807fffffu, 0x3f8000003f800000u},
                           {DType::kFloat16, 0x83ff83ff83ff83ffu, 0x3c003c003c003c00u},
                           {DType::kBFloat16, 0x807f807f807f807fu, 0x3f803f803f803f80u},
                           {DType::kFloat8E4M3FN, 0xbfbfbfbfbfbfbfbfu, 0},
                           {DType::kFloat8E5M2, 0xbfbfbfbfbfbfbfbfu, 0}};

__global__ void fill(std::uint64_t* words, std::size_t count, std::uint64_t random, std::uint64_t set) {
  const std::size_t step = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    std::uint64_t x = (i + 1) * 0x9e3779b97f4a7c15u;  // splitmix64
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    words[i] = ((x ^ x >> 31) & random) | set;
  }
}

// Nothing but reading: the exclusive or of all words.
__global__ void read_all(const uint4* packs, std::size_t count, unsigned* out) {
  constexpr int kAhead = 8;
  const std::size_t step = std::size_t{gridDim.x} * blockDim.x;
  unsigned all = 0;
  std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (; i + (kAhead - 1) * step < count; i += kAhead * step) {
    uint4 v[kAhead];
    for (int a = 0; a < kAhead; ++a) v[a] = __ldg(packs + i + a * step);
    for (int a = 0; a < kAhead; ++a) all ^= v[a].x ^ v[a].y ^ v[a].z ^ v[a].w;
  }
  for (; i < count; i += step) all ^= packs[i].x ^ packs[i].y ^ packs[i].z ^ packs[i].w;
  atomicXor(out, __reduce_xor_sync(0xffffffffu, all));
}

// Median seconds of `run(buffer)`; each time all buffers in turn.
double median_seconds(const std::function<void(int)>& run) {
  cudaEvent_t begin, end;
  MUST(cudaEventCreate(&begin));
  MUST(cudaEventCreate(&end));
  std::vector<float> times;
  for (int r = -2; r < kRuns; ++r) {  // the first ones do not count
    MUST(cudaEventRecord(begin));
    for (int b = 0; b < kBuffers; ++b) run(b);
    MUST(cudaEventRecord(end));
    MUST(cudaEventSynchronize(end));
    float milliseconds = 0;
    MUST(cudaEventElapsedTime(&milliseconds, begin, end));
    if (r >= 0) times.push_back(milliseconds);
  }
  MUST(cudaEventDestroy(begin));
  MUST(cudaEventDestroy(end));
  std::nth_element(times.begin(), times.begin() + kRuns / 2, times.end());
  return static_cast<double>(times[kRuns / 2]) / 1e3 / kBuffers;
}

class Speed {
 public:
  Speed() {
    for (int b = 0; b < kBuffers; ++b) buffers_.push_back(std::make_unique<DeviceMemory>(kBytes));
  }

  bool measure() {
    fill_all(kKinds[1]);
    measure_device();
    std::printf("\n%-24s %8s %14s %10s %10s\n", "scan of", "GB/s", "microseconds", "/ read", "/ copy");
    for (const Kind& kind : kKinds) {
      fill_all(kind);
      const std::vector<std::int64_t> one = {static_cast<std::int64_t>(kBytes)};
      measure_scan(std::string(dtype_name(kind.dtype)) + ", 1 GiB", kind.dtype, one);
    }
    for (const Kind& kind : {kKinds[1], kKinds[3]}) {
      fill_all(kind);
      measure_scan(std::string(dtype_name(kind.dtype)) + ", 300 tensors", kind.dtype, list());
    }
    return right_;
  }

 private:
  void fill_all(const Kind& kind) {
    for (const auto& buffer : buffers_) {
      fill<<<4096, 256>>>(reinterpret_cast<std::uint64_t*>(buffer->data()), kBytes / 8, kind.random,
                          kind.set);
    }
    MUST(cudaDeviceSynchronize());
  }

  void measure_device() {
    const DeviceMemory out(sizeof(unsigned));
    cudaDeviceProp device;
    MUST(cudaGetDeviceProperties(&device, 0));
    double best = 0;
    for (const int blocks_each : {4, 8, 16}) {  // the best of these is what the scan has to stand up to
      const double seconds = median_seconds([&](int b) {
        read_all<<<device.multiProcessorCount * blocks_each, 256>>>(
            reinterpret_cast<const uint4*>(buffers_[static_cast<std::size_t>(b)]->data()), kBytes / 16,
            reinterpret_cast<unsigned*>(out.data()));
      });
      best = std::max(best, kBytes / seconds);
    }
    MUST(cudaGetLastError());
    read_ = best;
    copy_ = 2 * kBytes / median_seconds([&](int b) {
              MUST(cudaMemcpyAsync(buffers_[static_cast<std::size_t>((b + 1) % kBuffers)]->data(),
                                   buffers_[static_cast<std::size_t>(b)]->data(), kBytes,
                                   cudaMemcpyDeviceToDevice));
            });
    std::printf("read kernel %.0f GB/s; copy, read and written bytes, %.0f GB/s\n", read_ / 1e9, copy_ / 1e9);
  }

  // Some large, some small, some tiny: 300 of them, under 1 GiB in all; bytes.
  static std::vector<std::int64_t> list() {
    std::vector<std::int64_t> sizes;
    for (std::int64_t i = 0; i < 100; ++i) {
      sizes.insert(sizes.end(),
                   {(std::int64_t{8} << 20) + 4096 * i, (std::int64_t{256} << 10) + 1024 * i, 4096 + 32 * i});
    }
    return sizes;
  }

  void measure_scan(const std::string& name, DType dtype, const std::vector<std::int64_t>& sizes) {
    std::vector<std::unique_ptr<CudaScanPlan>> plans;
    std::int64_t bytes = 0;
    for (const auto& buffer : buffers_) {
      std::vector<TensorView> views;
      bytes = 0;
      for (const std::int64_t size : sizes) {
        views.push_back(TensorView::contiguous(buffer->data() + bytes, dtype, size / dtype_size(dtype)));
        bytes += size;
      }
      must(CudaScanPlan::create(views, &plans.emplace_back()));
    }
    const double seconds =
        median_seconds([&](int b) { must(plans[static_cast<std::size_t>(b)]->launch(nullptr)); });
    check(name, plans, sizes, dtype);
    const double speed = static_cast<double>(bytes) / seconds;
    std::printf("%-24s %8.0f %14.1f %10.3f %10.3f\n", name.c_str(), speed / 1e9, seconds * 1e6, speed / read_,
                speed / copy_);
  }

  // All buffers hold the same, and nothing that is not finite.
  void check(const std::string& name, const std::vector<std::unique_ptr<CudaScanPlan>>& plans,
             const std::vector<std::int64_t>& sizes, DType dtype) {
    PinnedArray<CudaProbe> first(sizes.size());
    PinnedArray<CudaProbe> results(sizes.size());
    must(plans[0]->copy_results(nullptr, {first.data(), first.size()}));
    for (const auto& plan : plans) {
      must(plan->copy_results(nullptr, {results.data(), results.size()}));
      MUST(cudaDeviceSynchronize());
      bool right = std::memcmp(first.data(), results.data(), sizes.size() * sizeof(CudaProbe)) == 0;
      for (std::size_t i = 0; i < sizes.size(); ++i) {
        const Probe probe = to_probe(results[i]);
        right = right && probe.finite() && probe.squares.medium > 0 &&
                probe.count == static_cast<std::uint64_t>(sizes[i] / dtype_size(dtype));
      }
      if (right) continue;
      right_ = false;
      std::printf("MISMATCH: %s: the launches that were timed do not agree\n", name.c_str());
    }
  }

  std::vector<std::unique_ptr<DeviceMemory>> buffers_;
  double read_ = 0;
  double copy_ = 0;
  bool right_ = true;
};

}  // namespace

bool measure_speed() { return Speed().measure(); }

}  // namespace holdfast
