#include "holdfast/sparse_scan.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "chunk_sums.h"
#include "float_environment.h"
#include "holdfast/half.h"

namespace holdfast {
namespace {

Status check(const SparseView& gradient) {
  const DType dtype = gradient.values.dtype;
  if (dtype != DType::kFloat64 && dtype != DType::kFloat32 && dtype != DType::kFloat16 &&
      dtype != DType::kBFloat16) {
    return Status::usage("a sparse gradient of dtype " + std::string(dtype_name(dtype)) +
                         " cannot be scanned");
  }
  const auto rows = static_cast<std::int64_t>(gradient.rows.size());
  std::int64_t elements = 0;
  if (!gradient.values.strides.empty() || gradient.row_elements < 0 ||
      __builtin_mul_overflow(rows, gradient.row_elements, &elements) ||
      gradient.values.element_count != elements) {
    return Status::usage("a sparse gradient of " + std::to_string(rows) + " rows of " +
                         std::to_string(gradient.row_elements) + " elements has " +
                         std::to_string(gradient.values.element_count) +
                         " values, or they are not contiguous");
  }
  const std::int64_t most =
      std::numeric_limits<std::int64_t>::max() / std::max<std::int64_t>(1, gradient.row_elements);
  const auto wrong =
      std::ranges::find_if(gradient.rows, [&](std::int64_t row) { return row < 0 || row >= most; });
  if (wrong != gradient.rows.end()) {
    return Status::usage("a sparse gradient has row " + std::to_string(*wrong));
  }
  return Status();
}

template <typename T>
void add_as(const std::byte* from, std::byte* to, std::size_t count) {
  const auto* values = reinterpret_cast<const T*>(from);
  auto* sums = reinterpret_cast<T*>(to);
  for (std::size_t i = 0; i < count; ++i) sums[i] += values[i];
}

void add_row(const std::byte* from, DType dtype, std::byte* to, std::size_t count) {
  if (dtype == DType::kFloat64) return add_as<double>(from, to, count);
  if (dtype == DType::kFloat32) return add_as<float>(from, to, count);
  add_halves({reinterpret_cast<const std::uint16_t*>(from), count}, dtype,
             {reinterpret_cast<std::uint16_t*>(to), count});
}

}  // namespace

Status scan_sparse(const SparseView& gradient, Probe* probe) {
  if (Status s = check(gradient); !s.ok()) return s;
  const DefaultFloatEnvironment environment;
  const DType dtype = gradient.values.dtype;
  const auto elements = static_cast<std::size_t>(gradient.row_elements);
  const std::size_t bytes = elements * static_cast<std::size_t>(dtype_size(dtype));
  const auto* values = static_cast<const std::byte*>(gradient.values.data);

  std::vector<std::size_t> order(gradient.rows.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::stable_sort(order, {}, [&](std::size_t i) { return gradient.rows[i]; });

  *probe = Probe();
  std::vector<std::byte> sum(bytes);
  for (std::size_t i = 0; i < order.size();) {
    const std::int64_t row = gradient.rows[order[i]];
    const std::byte* data = values + order[i] * bytes;
    bool first = true;
    for (++i; i < order.size() && gradient.rows[order[i]] == row; ++i, first = false) {
      if (first && bytes > 0) std::memcpy(sum.data(), data, bytes);
      add_row(values + order[i] * bytes, dtype, sum.data(), elements);
    }
    if (!first) data = sum.data();
    const Probe part = scan(TensorView::contiguous(data, dtype, gradient.row_elements));
    append(*probe, part, row * gradient.row_elements);
    probe->squares += part.squares;
  }
  return Status();
}

}  // namespace holdfast
