// The sum of squares has the same bits wherever and however it is computed, and the processor is left as it
// was.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cfenv>
#include <random>

#include "ranks/instruction_sets.h"
#include "ranks/scan_patterns.h"

#ifdef __SSE2__
#include <xmmintrin.h>
#endif

namespace holdfast {
namespace {

TEST(ScanBits, AreTheSameOnEveryInstructionSet) {
  std::mt19937_64 random(11);
  for (const DType dtype : float_dtypes()) {
    for (const std::size_t bytes : {16u, 1000u, 40000u, 400000u}) {
      for (const bool even : {false, true}) {
        const std::vector<std::byte> memory = random_memory(bytes, dtype, random, even);
        const auto count = static_cast<std::int64_t>(bytes) / dtype_size(dtype);
        std::vector<std::uint64_t> first;
        on_each_instruction_set([&](const char* name) {
          const std::vector<std::uint64_t> bits =
              bits_of(scan(TensorView::contiguous(memory.data(), dtype, count)));
          if (first.empty()) first = bits;
          EXPECT_EQ(bits, first) << dtype_name(dtype) << ", " << bytes << " bytes, " << name;
        });
      }
    }
  }
}

TEST(ScanBits, SeveralInstructionSetsAreCompared) {
  EXPECT_GE(hwy::SupportedAndGeneratedTargets().size(), 2u);
}

TEST(ScanBits, AreTheSameForAnyNumberOfThreads) {
  std::mt19937_64 random(12);
  for (const DType dtype : float_dtypes()) {
    for (const bool even : {false, true}) {
      const std::size_t bytes = std::size_t{5} << 20;
      const std::vector<std::byte> memory = random_memory(bytes + 16, dtype, random, even);
      const auto count = static_cast<std::int64_t>(bytes) / dtype_size(dtype) + 1;
      const TensorView view = TensorView::contiguous(memory.data(), dtype, count);
      const std::vector<std::uint64_t> alone = bits_of(scan(view));
      for (const int threads : {2, 3, 7, 32, 100}) {
        EXPECT_EQ(bits_of(scan(view, {.threads = threads})), alone) << dtype_name(dtype) << ", " << threads;
      }
    }
  }
}

TEST(ScanBits, AreThoseOfAContiguousCopyForAnyView) {
  std::mt19937_64 random(13);
  for (const DType dtype : float_dtypes()) {
    const auto width = static_cast<std::size_t>(dtype_size(dtype));
    const std::int64_t rows = 301;
    const std::int64_t columns = 997;
    const auto count = static_cast<std::size_t>(rows * columns);
    const std::vector<std::byte> memory = random_memory(count * width, dtype, random, true);
    std::vector<std::byte> transposed(memory.size());
    for (std::size_t r = 0; r < static_cast<std::size_t>(rows); ++r) {
      for (std::size_t c = 0; c < static_cast<std::size_t>(columns); ++c) {
        std::memcpy(&transposed[(c * static_cast<std::size_t>(rows) + r) * width],
                    &memory[(r * static_cast<std::size_t>(columns) + c) * width], width);
      }
    }
    const std::vector<std::int64_t> shape = {columns, rows};
    const std::vector<std::int64_t> strides = {1, columns};
    EXPECT_EQ(bits_of(scan(TensorView::strided(memory.data(), dtype, shape, strides))),
              bits_of(scan(TensorView::contiguous(transposed.data(), dtype, rows * columns))))
        << dtype_name(dtype);
  }
}

TEST(ScanBits, OfAListAreThoseOfItsTensors) {
  std::mt19937_64 random(14);
  std::vector<std::vector<std::byte>> memories;
  std::vector<TensorView> views;
  for (int i = 0; i < 300; ++i) {
    const DType dtype = float_dtypes()[random() % float_dtypes().size()];
    const auto count = static_cast<std::int64_t>(random() % 500);
    memories.push_back(
        random_memory(static_cast<std::size_t>(count * dtype_size(dtype)) + 8, dtype, random, false));
    views.push_back(TensorView::contiguous(memories.back().data(), dtype, count));
  }
  std::vector<Probe> probes(views.size());
  scan(views, probes);
  for (std::size_t i = 0; i < views.size(); ++i) EXPECT_EQ(bits_of(probes[i]), bits_of(scan(views[i]))) << i;
}

TEST(ScanBits, DoNotDependOnTheRoundingMode) {
  std::mt19937_64 random(15);
  for (const DType dtype : float_dtypes()) {
    const std::vector<std::byte> memory = random_memory(50000, dtype, random, true);
    const TensorView view = TensorView::contiguous(memory.data(), dtype, 50000 / dtype_size(dtype));
    const std::vector<std::uint64_t> nearest = bits_of(scan(view));
    std::fesetround(FE_UPWARD);
    const std::vector<std::uint64_t> upward = bits_of(scan(view));
    const int mode = std::fegetround();
    std::fesetround(FE_TONEAREST);
    EXPECT_EQ(upward, nearest) << dtype_name(dtype);
    EXPECT_EQ(mode, FE_UPWARD);
  }
}

#ifdef __SSE2__
// A program that hunts NaN may have made them trap. The scan neither traps, nor leaves a flag that tells a
// lie.
TEST(ScanEnvironment, ExceptionsNeitherTrapNorLeaveATrace) {
  std::mt19937_64 random(16);
  for (const DType dtype : float_dtypes()) {
    const std::vector<std::byte> memory = random_memory(50000, dtype, random, false);
    const TensorView view = TensorView::contiguous(memory.data(), dtype, 50000 / dtype_size(dtype));
    const unsigned before = _mm_getcsr();
    for (const unsigned mode :
         {0x1f80u, 0x9fc0u, 0x0000u, 0x6015u}) {  // default; FTZ, DAZ; all trap; with flags
      _mm_setcsr(mode);
      const Probe probe = scan(view);
      const unsigned after = _mm_getcsr();
      _mm_setcsr(before);
      EXPECT_FALSE(probe.finite()) << dtype_name(dtype);
      EXPECT_EQ(after, mode) << dtype_name(dtype);
    }
  }
}
#endif

TEST(ScanBits, ContiguousTensorsOfMoreThan32BitsOfElementsAreScannedToTheEnd) {
#if !defined(NDEBUG) || defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "reads 2^32 elements: for optimised builds";
#else
  // Pages that were never written take no memory.
  const std::int64_t count = (std::int64_t{1} << 32) + 5;
  const auto bytes = static_cast<std::size_t>(count);
  void* memory =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  static_cast<std::uint8_t*>(memory)[count - 1] = 0xfc;  // -Inf
  static_cast<std::uint8_t*>(memory)[count - 2] = 0x3c;  // 1
  const Probe probe = scan(TensorView::contiguous(memory, DType::kFloat8E5M2, count), {.threads = 2});
  munmap(memory, bytes);
  EXPECT_EQ(probe.count, static_cast<std::uint64_t>(count));
  EXPECT_EQ(probe.bad, (BadCounts{0, 0, 1}));
  EXPECT_EQ(probe.first_bad, count - 1);
  EXPECT_EQ(probe.squares.value(), 1);
#endif
}

}  // namespace
}  // namespace holdfast
