// The finite scan: one pass over a tensor.
#pragma once

#include <cstdint>

#include "holdfast/collectives/record.h"
#include "holdfast/tensor_view.h"

namespace holdfast {

// A measurement of one tensor.
struct Probe {
  std::uint64_t count = 0;      // elements
  BadCounts bad;                // by class; a signalling NaN is a NaN
  std::int64_t first_bad = -1;  // flat row-major index of the first non-finite element, -1 when there is none
  double abs_max = 0.0;         // largest magnitude among the finite elements, exact
  double sum_of_squares = 0.0;  // of the finite elements, in fp64; +Inf when fp64 elements overflow it

  bool finite() const { return bad.total() == 0; }
};

// Classifies bits, so it is right under -ffast-math too, and each element in the type it is stored in: a
// value that is finite as fp32 may be infinite once rounded to bf16. Allocates nothing. Reads each element of
// the view once (elements behind a stride of 0 as often as the view shows them), and nothing else.
// Local; any thread.
Probe scan(const TensorView& tensor);

}  // namespace holdfast
