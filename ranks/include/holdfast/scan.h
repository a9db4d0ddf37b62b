// The finite scan: one pass over a tensor.
#pragma once

#include <cstdint>
#include <span>

#include "holdfast/collectives/record.h"
#include "holdfast/sum_of_squares.h"
#include "holdfast/tensor_view.h"

namespace holdfast {

// A measurement of one tensor. A complex element with a non-finite part is one bad element: a NaN if either
// part is one, else an infinity with the sign of its first infinite part; `abs_max` is then that of the
// parts. Integers and bool are always finite: they are counted, not read, and the magnitudes stay 0.
struct Probe {
  std::uint64_t count = 0;      // elements
  BadCounts bad;                // by class; a signalling NaN is a NaN
  std::int64_t first_bad = -1;  // flat row-major index of the first non-finite element, -1 when there is none
  double abs_max = 0.0;         // largest magnitude among the finite elements, exact
  SumOfSquares squares;         // of the finite elements

  bool finite() const { return bad.total() == 0; }
};

struct ScanOptions {
  // Threads that share the work, the caller's included; they are started and joined in the call, which pays
  // from some 10 MB on. The result is the same, bit for bit.
  int threads = 1;
};

// Classifies bits, so it is right under -ffast-math too, and each element in the type it is stored in: a
// value that is finite as fp32 may be infinite once rounded to bf16. Allocates nothing on one thread. Reads
// each element of the view once (elements behind a stride of 0 as often as the view shows them; a few kB
// again where they hold something not finite), and nothing else. Leaves the floating-point environment as it
// was, and does not depend on it. Local; any thread.
//
// The sum of squares has the same bits on any processor, with any number of threads, and for any view that
// shows the same elements. Relative error at most 2^-17 (fp32 and narrower types; 2^-18 for their root, the
// norm), or 2^-46 (fp64).
//
// A type that is not known is never clean: every element counts as NaN.
Probe scan(const TensorView& tensor, const ScanOptions& options = {});

// scan() of each; `probes` has one entry a tensor. For hundreds of small tensors.
void scan(std::span<const TensorView> tensors, std::span<Probe> probes);

}  // namespace holdfast
