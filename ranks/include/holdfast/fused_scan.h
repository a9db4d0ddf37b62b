// Scans joined to what a trainer does to the same values anyway, so that they come from memory once.
//
// Each works a chunk at a time (128 KiB of fp32), which is still in the cache when it is scanned. The probe
// is that of scan() over the values as they are afterwards. Local; any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "holdfast/scan.h"

namespace holdfast {

// values[i] *= factor, such as the inverse of the loss scale. A factor of 1 only scans.
Probe scale_and_scan(std::span<float> values, float factor);

// out[i] = values[i] rounded to `dtype`, kFloat16 or kBFloat16, such as for the reduction: see half.h. What
// rounding makes infinite is a finding.
Probe narrow_and_scan(std::span<const float> values, DType dtype, std::span<std::uint16_t> out);

// out[i] = values[i] * factor, in fp32.
Probe widen_and_scan(std::span<const std::uint16_t> values, DType dtype, float factor, std::span<float> out);

// XXH3 of 128 bits of the memory of a contiguous tensor, such as for a checkpoint.
struct Digest128 {
  std::uint64_t low = 0;
  std::uint64_t high = 0;
  bool operator==(const Digest128&) const = default;
};
Probe scan_and_digest(const TensorView& tensor, Digest128* digest);

// The same, bit for bit, of a tensor that comes in pieces, in their order. Used by one thread at a time.
class ScanAndDigest {
 public:
  // A piece that is not the last holds a multiple of so many elements, of any dtype.
  static constexpr std::int64_t kPieceElements = std::int64_t{1} << 17;

  explicit ScanAndDigest(DType dtype);
  ~ScanAndDigest();
  ScanAndDigest(const ScanAndDigest&) = delete;
  ScanAndDigest& operator=(const ScanAndDigest&) = delete;

  void add(const void* data, std::int64_t elements);
  const Probe& so_far() const;      // of the pieces added, but for the squares
  Probe finish(Digest128* digest);  // once, after the last piece

 private:
  friend Probe scan_and_digest(const TensorView& tensor, Digest128* digest);
  struct State;
  const std::unique_ptr<State> state_;
};

}  // namespace holdfast
