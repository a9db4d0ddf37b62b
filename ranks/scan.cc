#include "holdfast/scan.h"

#include <algorithm>
#include <bit>
#include <cassert>
#include <type_traits>

namespace holdfast {
namespace {

template <DType>
struct Format;

// IEEE 754 layout of each type: an all-ones exponent is NaN, or infinity when the fraction is zero.
template <typename UInt, int kFractionBits>
struct Ieee {
  using Bits = UInt;
  static constexpr Bits kSign = static_cast<Bits>(Bits{1} << (sizeof(Bits) * 8 - 1));
  static constexpr Bits kInfinity = static_cast<Bits>((kSign - 1) >> kFractionBits << kFractionBits);
  static constexpr Bits kLeastNormal = static_cast<Bits>(Bits{1} << kFractionBits);
};

template <>
struct Format<DType::kFloat64> : Ieee<std::uint64_t, 52> {
  static double value(Bits bits) { return std::bit_cast<double>(bits); }
  static double exact(Bits magnitude) { return value(magnitude); }
};

template <>
struct Format<DType::kFloat32> : Ieee<std::uint32_t, 23> {
  static double value(Bits bits) { return static_cast<double>(std::bit_cast<float>(bits)); }
  // Right for subnormals even where the floating-point environment reads them as zero.
  static double exact(Bits magnitude) {
    return magnitude < kLeastNormal ? 0x1p-149 * static_cast<double>(magnitude) : value(magnitude);
  }
};

template <>
struct Format<DType::kBFloat16> : Ieee<std::uint16_t, 7> {
  static double value(Bits bits) {
    return static_cast<double>(std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16));
  }
  static double exact(Bits magnitude) {
    return magnitude < kLeastNormal ? 0x1p-133 * static_cast<double>(magnitude) : value(magnitude);
  }
};

template <>
struct Format<DType::kFloat16> : Ieee<std::uint16_t, 10> {
  // Reads the half's exponent and fraction as those of a double and corrects the exponent's bias.
  static double value(Bits bits) {
    constexpr std::uint64_t kBiasDifference = 1023 - 15;
    const std::uint64_t magnitude = bits & 0x7fffu;
    const std::uint64_t sign = static_cast<std::uint64_t>(bits & 0x8000u) << 48;
    if (magnitude < 0x400) return (sign != 0 ? -0x1p-24 : 0x1p-24) * static_cast<double>(magnitude);
    return std::bit_cast<double>(sign | ((magnitude << 42) + (kBiasDifference << 52)));
  }
  static double exact(Bits magnitude) { return value(magnitude); }
};

// Squares are summed in this many partial sums and joined in one fixed order, so the same elements give the
// same bits on any machine.
constexpr int kPartialSums = 16;
constexpr std::int64_t kBlock = 1024;

template <DType kType>
class Scanner {
 public:
  using F = Format<kType>;
  using Bits = typename F::Bits;

  // `stride` in elements. `flat` is the row-major index of the first of the elements.
  void add(const Bits* data, std::int64_t count, std::int64_t stride, std::int64_t flat) {
    for (std::int64_t begin = 0; begin < count; begin += kBlock) {
      const std::int64_t n = std::min(kBlock, count - begin);
      if (stride == 1) {
        add_block(data + begin, n, flat + begin);
      } else {
        add_exactly(data + begin * stride, n, stride, flat + begin);
      }
    }
    probe_.count += static_cast<std::uint64_t>(count);
  }

  Probe finish() {
    probe_.abs_max = F::exact(max_magnitude_);
    for (const double partial : sums_) probe_.sum_of_squares += partial;
    return probe_;
  }

 private:
  // The common case has no branch on a value: the largest magnitude tells afterwards whether any element was
  // not finite, and only then is the block gone over again.
  void add_block(const Bits* data, std::int64_t n, std::int64_t flat) {
    Bits largest = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      largest = std::max(largest, static_cast<Bits>(data[i] & static_cast<Bits>(~F::kSign)));
    }
    if (largest >= F::kInfinity) {
      add_exactly(data, n, 1, flat);
      return;
    }
    max_magnitude_ = std::max(max_magnitude_, largest);
    std::int64_t i = 0;
    for (; i + kPartialSums <= n; i += kPartialSums) {
      for (int k = 0; k < kPartialSums; ++k) {
        const double v = F::value(data[i + k]);
        sums_[k] += v * v;
      }
    }
    for (int k = 0; i < n; ++i, ++k) {
      const double v = F::value(data[i]);
      sums_[k] += v * v;
    }
  }

  void add_exactly(const Bits* data, std::int64_t n, std::int64_t stride, std::int64_t flat) {
    for (std::int64_t i = 0; i < n; ++i) {
      const Bits bits = data[i * stride];
      const Bits magnitude = bits & static_cast<Bits>(~F::kSign);
      if (magnitude < F::kInfinity) {
        max_magnitude_ = std::max(max_magnitude_, magnitude);
        const double v = F::value(bits);
        sums_[i % kPartialSums] += v * v;
        continue;
      }
      if (probe_.first_bad < 0) probe_.first_bad = flat + i;
      if (magnitude > F::kInfinity) {
        ++probe_.bad.nan;
      } else {
        ++(bits & F::kSign ? probe_.bad.neg_inf : probe_.bad.pos_inf);
      }
    }
  }

  Probe probe_;
  Bits max_magnitude_ = 0;
  double sums_[kPartialSums] = {};
};

// Walks all dimensions but the last, which the scanner takes whole.
template <DType kType>
void add_strided(Scanner<kType>& scanner, const typename Format<kType>::Bits* data,
                 std::span<const std::int64_t> shape, std::span<const std::int64_t> strides,
                 std::int64_t flat) {
  if (shape.size() <= 1) {
    scanner.add(data, shape.empty() ? 1 : shape[0], shape.empty() ? 1 : strides[0], flat);
    return;
  }
  std::int64_t inner = 1;
  for (const std::int64_t extent : shape.subspan(1)) inner *= extent;
  if (inner == 0) return;
  for (std::int64_t i = 0; i < shape[0]; ++i) {
    add_strided(scanner, data + i * strides[0], shape.subspan(1), strides.subspan(1), flat + i * inner);
  }
}

template <DType kType>
Probe scan_as(const TensorView& tensor) {
  const auto* data = static_cast<const typename Format<kType>::Bits*>(tensor.data);
  Scanner<kType> scanner;
  if (tensor.shape.empty()) {
    scanner.add(data, tensor.element_count, 1, 0);
  } else {
    add_strided(scanner, data, tensor.shape, tensor.strides, 0);
  }
  return scanner.finish();
}

}  // namespace

std::int64_t dtype_size(DType dtype) {
  switch (dtype) {
    case DType::kFloat64: return 8;
    case DType::kFloat32: return 4;
    case DType::kFloat16:
    case DType::kBFloat16: return 2;
  }
  return 0;
}

double dtype_largest(DType dtype) {
  switch (dtype) {
    case DType::kFloat64: return Format<DType::kFloat64>::value(Format<DType::kFloat64>::kInfinity - 1);
    case DType::kFloat32: return Format<DType::kFloat32>::value(Format<DType::kFloat32>::kInfinity - 1);
    case DType::kFloat16: return Format<DType::kFloat16>::value(Format<DType::kFloat16>::kInfinity - 1);
    case DType::kBFloat16: return Format<DType::kBFloat16>::value(Format<DType::kBFloat16>::kInfinity - 1);
  }
  return 0;
}

TensorView TensorView::strided(const void* data, DType dtype, std::span<const std::int64_t> shape,
                               std::span<const std::int64_t> strides) {
  assert(shape.size() == strides.size());
  std::int64_t count = 1;
  for (const std::int64_t extent : shape) count *= extent;
  return {data, dtype, count, shape, strides};
}

TensorView TensorView::slice(std::int64_t offset, std::int64_t count) const {
  assert(shape.empty() && offset >= 0 && count >= 0 && offset + count <= element_count);
  return contiguous(static_cast<const char*>(data) + offset * dtype_size(dtype), dtype, count);
}

Probe scan(const TensorView& tensor) {
  switch (tensor.dtype) {
    case DType::kFloat64: return scan_as<DType::kFloat64>(tensor);
    case DType::kFloat32: return scan_as<DType::kFloat32>(tensor);
    case DType::kFloat16: return scan_as<DType::kFloat16>(tensor);
    case DType::kBFloat16: return scan_as<DType::kBFloat16>(tensor);
  }
  // Never "clean" for a type that was not looked at.
  assert(false && "unknown dtype");
  Probe unknown;
  unknown.count = static_cast<std::uint64_t>(tensor.element_count);
  unknown.bad.nan = unknown.count;
  unknown.first_bad = 0;
  return unknown;
}

}  // namespace holdfast
