#include "train/gradient_bucket.h"

#include <algorithm>

#include "holdfast/half.h"

namespace holdfast::train {
namespace {

// Gradients are reduced in pieces of this many elements, whatever the tensors' sizes.
constexpr std::size_t kPiece = std::size_t{1} << 16;

// MPI 3 has no 16-bit floating point type.
template <DType kType>
void sum_halves(void* in, void* inout, int* count, MPI_Datatype*) {
  const auto n = static_cast<std::size_t>(*count);
  add_halves({static_cast<const std::uint16_t*>(in), n}, kType, {static_cast<std::uint16_t*>(inout), n});
}

}  // namespace

GradientBucket::GradientBucket(std::span<float> gradients, DType dtype, MPI_Comm communicator)
    : gradients_(gradients), dtype_(dtype), communicator_(communicator) {
  if (dtype_ == DType::kFloat32) return;
  half_.resize(gradients.size());
  constexpr int kCommutes = 1;
  MPI_Op_create(dtype_ == DType::kFloat16 ? sum_halves<DType::kFloat16> : sum_halves<DType::kBFloat16>,
                kCommutes, &sum_);
}

GradientBucket::~GradientBucket() {
  if (sum_ != MPI_SUM) MPI_Op_free(&sum_);
}

void GradientBucket::pack() {
  if (!half_.empty()) narrow(gradients_, dtype_, half_);
}

void GradientBucket::clear() {
  std::ranges::fill(gradients_, 0.0f);
  std::ranges::fill(half_, std::uint16_t{0});
}

void GradientBucket::reduce() {
  for (std::size_t begin = 0; begin < gradients_.size(); begin += kPiece) {
    const int count = static_cast<int>(std::min(kPiece, gradients_.size() - begin));
    if (half_.empty()) {
      MPI_Allreduce(MPI_IN_PLACE, gradients_.data() + begin, count, MPI_FLOAT, MPI_SUM, communicator_);
    } else {
      MPI_Allreduce(MPI_IN_PLACE, half_.data() + begin, count, MPI_UINT16_T, sum_, communicator_);
    }
  }
}

Probe GradientBucket::pack_and_scan(const BucketSlice& slice) {
  if (half_.empty()) return scan(TensorView::of(gradients_of(slice)));
  return narrow_and_scan(gradients_of(slice), dtype_, halves_of(slice));
}

Probe GradientBucket::unpack_and_scan(const BucketSlice& slice, float factor) {
  if (half_.empty()) return scale_and_scan(gradients_of(slice), factor);
  return widen_and_scan(halves_of(slice), dtype_, factor, gradients_of(slice));
}

TensorView GradientBucket::view() const {
  if (half_.empty()) return TensorView::of(gradients_);
  return TensorView::contiguous(half_.data(), dtype_, static_cast<std::int64_t>(half_.size()));
}

std::span<float> GradientBucket::gradients_of(const BucketSlice& slice) const {
  return gradients_.subspan(static_cast<std::size_t>(slice.offset), static_cast<std::size_t>(slice.count));
}

std::span<std::uint16_t> GradientBucket::halves_of(const BucketSlice& slice) {
  return std::span(half_).subspan(static_cast<std::size_t>(slice.offset),
                                  static_cast<std::size_t>(slice.count));
}

std::vector<float> GradientBucket::read(std::int64_t offset, std::int64_t count) const {
  std::vector<float> values(static_cast<std::size_t>(count));
  const auto begin = static_cast<std::size_t>(offset);
  if (half_.empty()) {
    std::ranges::copy(gradients_.subspan(begin, values.size()), values.begin());
  } else {
    widen(std::span(half_).subspan(begin, values.size()), dtype_, values);
  }
  return values;
}

void GradientBucket::write(std::int64_t offset, std::span<const float> values) {
  const auto begin = static_cast<std::size_t>(offset);
  if (half_.empty()) {
    std::ranges::copy(values, gradients_.begin() + static_cast<std::ptrdiff_t>(begin));
  } else {
    narrow(values, dtype_, std::span(half_).subspan(begin, values.size()));
  }
}

}  // namespace holdfast::train
