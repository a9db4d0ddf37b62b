// The gradient on its way to the other ranks: held and reduced in the precision that was asked for.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "holdfast/fused_scan.h"
#include "holdfast/step_guard.h"
#include "holdfast/tensor_view.h"

namespace holdfast::train {

// fp32 is reduced where it lies. 16-bit types are copied into a bucket of their own, summed there by a rule
// of their own (each partial sum rounded once), and copied back. The sum's bits are the same on every rank.
class GradientBucket {
 public:
  // `gradients`: the flat fp32 gradients, which outlive the bucket. `dtype`: fp32, fp16 or bf16.
  GradientBucket(std::span<float> gradients, DType dtype, MPI_Comm communicator);
  ~GradientBucket();
  GradientBucket(const GradientBucket&) = delete;
  GradientBucket& operator=(const GradientBucket&) = delete;

  void pack();  // rounds the gradients into the bucket
  // The same for one tensor; and what it looks like in the bucket.
  Probe pack_and_scan(const BucketSlice& slice);
  void clear();   // zeros, for a rank that failed
  void reduce();  // sums over the ranks; collective
  // Widens one tensor of the sum back into the gradients, times `factor`, and measures it there.
  Probe unpack_and_scan(const BucketSlice& slice, float factor);
  TensorView view() const;

  // Lets `change` rewrite elements [offset, offset + count) of the bucket as fp32.
  template <typename Change>
  void edit(std::int64_t offset, std::int64_t count, Change change) {
    std::vector<float> values = read(offset, count);
    change(std::span<float>(values));
    write(offset, values);
  }

 private:
  std::span<float> gradients_of(const BucketSlice& slice) const;
  std::span<std::uint16_t> halves_of(const BucketSlice& slice);
  std::vector<float> read(std::int64_t offset, std::int64_t count) const;
  void write(std::int64_t offset, std::span<const float> values);

  const std::span<float> gradients_;
  const DType dtype_;
  const MPI_Comm communicator_;
  std::vector<std::uint16_t> half_;  // empty for fp32
  MPI_Op sum_ = MPI_SUM;
};

}  // namespace holdfast::train
