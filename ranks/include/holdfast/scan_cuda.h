// The finite scan of tensors in a GPU's memory: all tensors of a list by one kernel, nothing read back. The
// header needs no CUDA; the target is holdfast::scan_cuda.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "holdfast/collectives/status.h"
#include "holdfast/scan.h"

struct CUstream_st;  // what a cudaStream_t points to

namespace holdfast {

// A Probe as it lies in device memory.
struct CudaProbe {
  std::uint64_t count = 0;
  std::uint64_t nan = 0;
  std::uint64_t pos_inf = 0;
  std::uint64_t neg_inf = 0;
  std::int64_t first_bad = -1;
  double abs_max = 0.0;
  double small = 0.0;  // the sum of squares, see SumOfSquares
  double medium = 0.0;
  double large = 0.0;
};
static_assert(sizeof(CudaProbe) == 72);

inline Probe to_probe(const CudaProbe& probe) {
  return {.count = probe.count,
          .bad = {.nan = probe.nan, .pos_inf = probe.pos_inf, .neg_inf = probe.neg_inf},
          .first_bad = probe.first_bad,
          .abs_max = probe.abs_max,
          .squares = {.small = probe.small, .medium = probe.medium, .large = probe.large}};
}

// A list of tensors on one device, ready to be scanned again and again: each attempt's gradients, say. The
// results are those of scan(), bit for bit. Local; any thread, but a plan is one scan at a time: launches of
// it must not overlap, so keep to one stream. Its tables and its workspace lie in device memory: at most 100
// bytes for each 128 KiB that are scanned, and some 200 for each tensor.
class CudaScanPlan {
 public:
  // `tensors` are contiguous, hold at most 2^48 bytes in all, and lie in memory that the current device can
  // read, aligned to their numbers (multiples of 16 bytes are read much faster); they may be of different
  // dtypes. Their memory must stay where it is as long as the plan is launched, and must not be written while
  // it is scanned. Allocates, and waits for the device: not while a stream is captured. A view with strides,
  // an unknown dtype or a null pointer is USAGE; a CUDA call that fails is INTERNAL, here and below.
  static Status create(std::span<const TensorView> tensors, std::unique_ptr<CudaScanPlan>* plan);
  ~CudaScanPlan();  // the launches must have ended
  CudaScanPlan(const CudaScanPlan&) = delete;
  CudaScanPlan& operator=(const CudaScanPlan&) = delete;

  // Enqueues one scan, a single kernel: no allocation, no copy, no waiting, so it can be captured in a CUDA
  // graph. `stream` is of the device the plan was created on.
  Status launch(CUstream_st* stream);

  // Enqueues the copy of the results, in the order of the list. `host` has size() entries, in pinned memory
  // (otherwise the call waits, and cannot be captured), valid until the copy has been made.
  Status copy_results(CUstream_st* stream, std::span<CudaProbe> host) const;

  std::size_t size() const;  // tensors

  // In device memory, written by each launch: the results, in the order of the list; and 1 when an element of
  // any tensor is not finite, else 0, for a kernel that is to leave an update out. Before the first launch
  // the flag is 0, and a launch that failed leaves both as they were.
  const CudaProbe* device_results() const;
  const std::uint32_t* device_skip_flag() const;

 private:
  struct Impl;
  explicit CudaScanPlan(std::unique_ptr<Impl> impl);
  const std::unique_ptr<Impl> impl_;
};

}  // namespace holdfast
