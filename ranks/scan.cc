#include "holdfast/scan.h"

#include <algorithm>
#include <cassert>
#include <cstddef>
#include <cstring>
#include <thread>
#include <vector>

#include "chunk_sums.h"
#include "float_environment.h"
#include "scan_kernels.h"

namespace holdfast {
namespace {

std::int64_t chunks_of(const TensorView& tensor) {
  const std::int64_t size = chunk_elements(tensor.dtype);
  return (tensor.element_count + size - 1) / size;
}

// Chunk `index` of a contiguous tensor.
void add_chunk(const TensorView& tensor, std::int64_t index, Probe& probe, Strands& strands) {
  const std::int64_t size = chunk_elements(tensor.dtype);
  const std::int64_t begin = index * size;
  const char* data = static_cast<const char*>(tensor.data) + begin * dtype_size(tensor.dtype);
  const Probe part = scan_chunk(tensor.dtype, data, std::min(size, tensor.element_count - begin));
  append(probe, part, begin);
  strand_of(strands, index) += part.squares;
}

Probe scan_contiguous(const TensorView& tensor) {
  const std::int64_t chunks = chunks_of(tensor);
  if (chunks <= 1) return scan_chunk(tensor.dtype, tensor.data, tensor.element_count);
  Probe probe;
  Strands strands;
  for (std::int64_t c = 0; c < chunks; ++c) add_chunk(tensor, c, probe, strands);
  probe.squares = fold(strands);
  return probe;
}

// Each thread takes whole strands, so each strand is summed in its order.
Probe scan_contiguous_on(const TensorView& tensor, int threads) {
  const std::int64_t chunks = chunks_of(tensor);
  threads = static_cast<int>(std::min<std::int64_t>({threads, kStrands, chunks}));
  if (threads <= 1) return scan_contiguous(tensor);
  Strands strands;
  std::vector<Probe> probes(static_cast<std::size_t>(threads));
  const auto work = [&](int thread) {
    const DefaultFloatEnvironment environment;
    for (std::int64_t s = thread; s < kStrands; s += threads) {
      for (std::int64_t c = s; c < chunks; c += kStrands) {
        add_chunk(tensor, c, probes[static_cast<std::size_t>(thread)], strands);
      }
    }
  };
  {
    std::vector<std::jthread> others;
    for (int t = 1; t < threads; ++t) others.emplace_back(work, t);
    work(0);
  }
  Probe probe;
  for (const Probe& part : probes) append(probe, part, 0);
  probe.squares = fold(strands);
  return probe;
}

// Elements from anywhere, put together to blocks.
class Blocks {
 public:
  explicit Blocks(DType dtype)
      : dtype_(dtype),
        width_(static_cast<std::size_t>(dtype_size(dtype))),
        size_(chunk_elements(dtype) / kBlocksPerChunk) {
    assert(static_cast<std::size_t>(size_) * width_ <= sizeof(block_));
  }

  // Elements `stride` bytes apart.
  void add(const std::byte* data, std::int64_t count, std::int64_t stride) {
    while (count > 0) {
      const std::int64_t n = std::min(count, size_ - filled_);
      std::byte* out = block_ + static_cast<std::size_t>(filled_) * width_;
      if (stride == static_cast<std::int64_t>(width_)) {
        std::memcpy(out, data, static_cast<std::size_t>(n) * width_);
      } else {
        copy(data, n, stride, out);
      }
      filled_ += n;
      data += n * stride;
      count -= n;
      if (filled_ == size_) flush();
    }
  }

  Probe finish() {
    if (filled_ > 0) flush();
    end_chunk();
    probe_.squares = fold(strands_);
    return probe_;
  }

 private:
  void copy(const std::byte* data, std::int64_t count, std::int64_t stride, std::byte* out) const {
    const auto each = [&](auto width) {
      for (std::int64_t i = 0; i < count; ++i) std::memcpy(out + i * width, data + i * stride, width);
    };
    switch (width_) {
      case 1: return each(std::integral_constant<std::size_t, 1>());
      case 2: return each(std::integral_constant<std::size_t, 2>());
      case 4: return each(std::integral_constant<std::size_t, 4>());
      case 8: return each(std::integral_constant<std::size_t, 8>());
      default: return each(std::integral_constant<std::size_t, 16>());
    }
  }

  void flush() {
    const Probe part = scan_chunk(dtype_, block_, filled_);
    append(probe_, part, static_cast<std::int64_t>(probe_.count));
    chunk_ += part.squares;
    filled_ = 0;
    if (++blocks_ % kBlocksPerChunk == 0) end_chunk();
  }

  void end_chunk() {
    strand_of(strands_, chunks_++) += chunk_;
    chunk_ = {};
  }

  const DType dtype_;
  const std::size_t width_;
  const std::int64_t size_;  // elements of a block
  std::int64_t filled_ = 0;
  std::int64_t blocks_ = 0;
  std::int64_t chunks_ = 0;
  Probe probe_;
  SumOfSquares chunk_;
  Strands strands_;
  alignas(64) std::byte block_[std::size_t{kRows} * kLanes * sizeof(float)];
};

// Walks all dimensions but the last, which the blocks take whole.
void add_strided(Blocks& blocks, const std::byte* data, std::int64_t width,
                 std::span<const std::int64_t> shape, std::span<const std::int64_t> strides) {
  if (shape.size() == 1) return blocks.add(data, shape[0], strides[0] * width);
  for (std::int64_t i = 0; i < shape[0]; ++i) {
    add_strided(blocks, data + i * strides[0] * width, width, shape.subspan(1), strides.subspan(1));
  }
}

Probe scan_strided(const TensorView& tensor) {
  Blocks blocks(tensor.dtype);
  add_strided(blocks, static_cast<const std::byte*>(tensor.data), dtype_size(tensor.dtype), tensor.shape,
              tensor.strides);
  return blocks.finish();
}

Probe unread(const TensorView& tensor) {
  Probe probe;
  probe.count = static_cast<std::uint64_t>(tensor.element_count);
  if (!is_known(tensor.dtype) && probe.count > 0) {
    probe.bad.nan = probe.count;
    probe.first_bad = 0;
  }
  return probe;
}

// In the default floating-point environment.
Probe measure(const TensorView& tensor, int threads) {
  if (is_always_finite(tensor.dtype) || !is_known(tensor.dtype) || tensor.element_count == 0) {
    return unread(tensor);
  }
  if (tensor.strides.empty()) return scan_contiguous_on(tensor, threads);
  return scan_strided(tensor);
}

}  // namespace

Probe scan(const TensorView& tensor, const ScanOptions& options) {
  const DefaultFloatEnvironment environment;
  return measure(tensor, options.threads);
}

void scan(std::span<const TensorView> tensors, std::span<Probe> probes) {
  assert(tensors.size() == probes.size());
  const DefaultFloatEnvironment environment;
  for (std::size_t i = 0; i < tensors.size(); ++i) probes[i] = measure(tensors[i], 1);
}

}  // namespace holdfast
