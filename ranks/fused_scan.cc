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

Probe scan_and_digest(const TensorView& tensor, Digest128* digest) {
  assert(tensor.strides.empty());
  const auto width = static_cast<std::size_t>(dtype_size(tensor.dtype));
  const auto* data = static_cast<const unsigned char*>(tensor.data);
  const auto count = static_cast<std::size_t>(tensor.element_count);
  XXH3_state_t state;
  XXH3_128bits_reset(&state);
  Probe probe;
  if (is_known(tensor.dtype) && !is_always_finite(tensor.dtype)) {
    probe = by_chunks(tensor.dtype, count, [&](std::size_t begin, std::size_t n) {
      XXH3_128bits_update(&state, data + begin * width, n * width);
      return data + begin * width;
    });
  } else {
    probe = scan(tensor);
    if (count > 0) XXH3_128bits_update(&state, data, count * width);
  }
  const XXH128_hash_t hash = XXH3_128bits_digest(&state);
  *digest = {hash.low64, hash.high64};
  return probe;
}

}  // namespace holdfast
