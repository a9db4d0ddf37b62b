// The finite scan of a sparse gradient, such as an embedding's.
#pragma once

#include <cstdint>
#include <span>

#include "holdfast/collectives/status.h"
#include "holdfast/scan.h"

namespace holdfast {

// Rows of a dense tensor of shape (anything, row_elements). A row may be there several times, in any order:
// an optimizer adds these up.
struct SparseView {
  std::span<const std::int64_t> rows;  // which row each is
  TensorView values;                   // contiguous, rows.size() * row_elements: fp64, fp32, fp16 or bf16
  std::int64_t row_elements = 0;
};

// Judges what the optimizer will see: rows that are there several times are first added up, in their order
// and in their dtype, rounded after each addition, so that two finite values may make an infinity. `probe`
// counts the elements of different rows; its `first_bad` is the flat index in the dense tensor of the lowest
// bad element. Takes memory for one index a row. USAGE for a dtype that is none of the above, a negative row,
// or sizes that do not fit.
Status scan_sparse(const SparseView& gradient, Probe* probe);

}  // namespace holdfast
