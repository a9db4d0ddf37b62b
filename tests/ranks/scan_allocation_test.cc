// The scan needs no scratch that grows with the tensor: it allocates nothing at all.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "ranks/scan_reference.h"

namespace {
std::atomic<long> g_allocations{0};

void* counted(std::size_t size) {
  ++g_allocations;
  if (void* memory = std::malloc(size == 0 ? 1 : size)) return memory;
  throw std::bad_alloc();
}
}  // namespace

// Where GCC inlines only one of a pair it takes malloc and delete, or new and free, for a mismatch.
#define KEPT_APART [[gnu::noinline]]
KEPT_APART void* operator new(std::size_t size) { return counted(size); }
KEPT_APART void* operator new[](std::size_t size) { return counted(size); }
KEPT_APART void operator delete(void* memory) noexcept { std::free(memory); }
KEPT_APART void operator delete[](void* memory) noexcept { std::free(memory); }
KEPT_APART void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
KEPT_APART void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }

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
