#include "holdfast/fused_scan.h"

#define XXH_STATIC_LINKING_ONLY  // a state on the stack
#include <xxhash.h>

#include <algorithm>
#include <cassert>
#include <cstring>

#include "chunk_sums.h"
#include "float_environment.h"
#include "holdfast/half.h"

namespace holdfast {
namespace {

// `visit(begin, count)` makes elements [begin, begin + count) and returns where they are; then they are
// scanned.
template <typename Visit>
Probe by_chunks(DType dtype, std::size_t count, Visit visit) {
  const DefaultFloatEnvironment environment;
  const auto size = static_cast<std::size_t>(chunk_elements(dtype));
  Probe probe;
  Strands strands;
  std::int64_t chunk = 0;
  for (std::size_t begin = 0; begin < count; begin += size) {
    const std::size_t n = std::min(size, count - begin);
    const Probe part = scan_chunk(dtype, visit(begin, n), static_cast<std::int64_t>(n));
    append(probe, part, static_cast<std::int64_t>(begin));
    strand_of(strands, chunk++) += part.squares;
  }
  probe.squares = fold(strands);
  return probe;
}

}  // namespace

Probe scale_and_scan(std::span<float> values, float factor) {
  if (factor == 1.0f) return scan(TensorView::of(values));
  return by_chunks(DType::kFloat32, values.size(), [&](std::size_t begin, std::size_t count) {
    scale(values.data() + begin, static_cast<std::int64_t>(count), factor);
    return values.data() + begin;
  });
}

Probe narrow_and_scan(std::span<const float> values, DType dtype, std::span<std::uint16_t> out) {
  assert(values.size() == out.size());
  return by_chunks(dtype, values.size(), [&](std::size_t begin, std::size_t count) {
    narrow(values.subspan(begin, count), dtype, out.subspan(begin, count));
    return out.data() + begin;
  });
}

Probe widen_and_scan(std::span<const std::uint16_t> values, DType dtype, float factor, std::span<float> out) {
  assert(values.size() == out.size());
  return by_chunks(DType::kFloat32, values.size(), [&](std::size_t begin, std::size_t count) {
    const std::span<float> part = out.subspan(begin, count);
    widen(values.subspan(begin, count), dtype, part);
    if (factor != 1.0f) scale(part.data(), static_cast<std::int64_t>(count), factor);
    return part.data();
  });
}

struct ScanAndDigest::State {
  explicit State(DType of) : dtype(of), scanned(is_known(of) && !is_always_finite(of)) {
    XXH3_128bits_reset(&hash);
  }

  void add(const void* data, std::int64_t elements) {
    if (elements == 0) return;
    const auto* at = static_cast<const unsigned char*>(data);
    const auto width = static_cast<std::size_t>(dtype_size(dtype));
    if (!scanned) {
      append(probe, scan(TensorView::contiguous(data, dtype, elements)), added);
      XXH3_128bits_update(&hash, at, static_cast<std::size_t>(elements) * width);
    } else {
      const DefaultFloatEnvironment environment;
      const std::int64_t size = chunk_elements(dtype);
      assert(added % size == 0 && "a piece that is not the last must hold whole chunks");
      for (std::int64_t begin = 0; begin < elements; begin += size) {
        const std::int64_t n = std::min(size, elements - begin);
        const unsigned char* chunk = at + static_cast<std::size_t>(begin) * width;
        XXH3_128bits_update(&hash, chunk, static_cast<std::size_t>(n) * width);
        const Probe part = scan_chunk(dtype, chunk, n);
        append(probe, part, added + begin);
        strand_of(strands, (added + begin) / size) += part.squares;
      }
    }
    added += elements;
  }

  Probe finish(Digest128* digest) {
    const XXH128_hash_t value = XXH3_128bits_digest(&hash);
    *digest = {value.low64, value.high64};
    probe.squares = fold(strands);
    return probe;
  }

  const DType dtype;
  const bool scanned;
  XXH3_state_t hash;
  Probe probe;
  Strands strands;
  std::int64_t added = 0;
};

ScanAndDigest::ScanAndDigest(DType dtype) : state_(std::make_unique<State>(dtype)) {}
ScanAndDigest::~ScanAndDigest() = default;

void ScanAndDigest::add(const void* data, std::int64_t elements) { state_->add(data, elements); }
const Probe& ScanAndDigest::so_far() const { return state_->probe; }
Probe ScanAndDigest::finish(Digest128* digest) { return state_->finish(digest); }

Probe scan_and_digest(const TensorView& tensor, Digest128* digest) {
  assert(tensor.strides.empty());
  ScanAndDigest::State state(tensor.dtype);
  state.add(tensor.data, tensor.element_count);
  return state.finish(digest);
}

}  // namespace holdfast
