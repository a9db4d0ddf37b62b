// The scan needs no scratch that grows with the tensor: it allocates nothing at all.
#include <gtest/gtest.h>

#include "count_allocations.h"
#include "ranks/scan_reference.h"

namespace holdfast {
namespace {

TEST(ScanAllocation, CountsAllocationsAtAll) {
  const long before = g_allocations;
  int* volatile kept = new int;  // volatile: else the pair may be left out
  delete kept;
  EXPECT_GT(g_allocations, before);
}

// Field case 7.
TEST(ScanAllocation, NoneForTensorsOfAnySizeOrShapeCleanOrNot) {
  for (const FloatFormat& format : formats()) {
    for (const std::size_t n : {1u, 1000u, 300000u}) {
      for (const std::uint64_t last : {format.one(), format.quiet_nan()}) {
        std::vector<std::uint64_t> patterns(n, format.one());
        patterns.back() = last;
        const Stored stored(format, patterns);
        const std::vector<std::int64_t> shape = {1, static_cast<std::int64_t>(n), 1};
        const std::vector<std::int64_t> strides = {0, 1, 7};
        const long before = g_allocations;
        const Probe flat =
            scan(TensorView::contiguous(stored.at(0), format.dtype, static_cast<std::int64_t>(n)));
        const Probe strided = scan(TensorView::strided(stored.at(0), format.dtype, shape, strides));
        const long after = g_allocations;
        EXPECT_EQ(after - before, 0);
        EXPECT_EQ(flat.finite(), last == format.one());
        EXPECT_EQ(strided.finite(), last == format.one());
      }
    }
  }
}

}  // namespace
}  // namespace holdfast
