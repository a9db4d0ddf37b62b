// The scan of one block by a group of threads, each with kRow / group-size neighbouring lanes: the order of
// scan_kernels.h, and so its bits. Written once, over a `Group` that says how threads see each other's lanes:
// in the kernel by shuffles, on a CPU in an array. A group has
//
//   each(f)               f(Thread&) by every thread
//   add_across(d)         sums[j] += those of thread `index ^ d`, for each j, all at once
//   add_wide_across(d)    likewise for `wide`
//   top()                 the largest Thread::top
#pragma once

#include <cstring>
#include <type_traits>

#include "holdfast/sum_of_squares.h"
#include "scan_plan.h"
#include "scan_types.h"

namespace holdfast::cuda {

// What a type makes of a tile. Sizes are of parts.
template <class Type>
struct Geometry {
  using Bits = typename Type::Format::Bits;
  static constexpr int kPack = kPackBytes / static_cast<int>(sizeof(Bits));
  static constexpr int kGroupThreads = Type::kRow / kPack;
  static constexpr int kGroups = kTileThreads / kGroupThreads;  // each takes one block
  static constexpr int kBlock = Type::kRow * kRows;
  static constexpr int kTile = kBlock * kGroups;
  static constexpr int kChunks = kGroups / kBlocksPerChunk;
  static_assert(kTile * static_cast<std::int64_t>(sizeof(Bits)) == kTileBytes && kChunks > 0);
};

inline constexpr std::uint64_t kNone = ~std::uint64_t{0};

// What one thread found. `first` is the smallest index, of an element of the tensor.
struct Findings {
  std::uint32_t nan = 0;
  std::uint32_t pos_inf = 0;
  std::uint32_t neg_inf = 0;
  std::uint64_t first = kNone;

  HOLDFAST_DEVICE void note(FloatClass found, std::uint64_t at) {
    if (found == FloatClass::kNan) ++nan;
    if (found == FloatClass::kPosInf) ++pos_inf;
    if (found == FloatClass::kNegInf) ++neg_inf;
    if (at < first) first = at;
  }
};

template <class Type>
struct Thread {
  static constexpr int kPack = Geometry<Type>::kPack;

  int index = 0;  // in its group
  typename Type::Top top;
  typename Type::Sum sums[kPack];
  double wide[kPack];
  Findings findings;

  HOLDFAST_DEVICE void clear() {
    top = 0;
    for (int j = 0; j < kPack; ++j) sums[j] = 0;
  }
};

template <class Bits>
HOLDFAST_DEVICE Bits element(const Pack& pack, int j) {
  if constexpr (sizeof(Bits) == 8) {
    return std::uint64_t{pack.words[2 * j + 1]} << 32 | pack.words[2 * j];
  } else {
    constexpr int kEach = 4 / static_cast<int>(sizeof(Bits));
    return static_cast<Bits>(pack.words[j / kEach] >> 8 * static_cast<int>(sizeof(Bits)) * (j % kEach));
  }
}

template <class Bits>
HOLDFAST_DEVICE void set_element(Pack& pack, int j, Bits bits) {
  if constexpr (sizeof(Bits) == 8) {
    pack.words[2 * j] = static_cast<std::uint32_t>(bits);
    pack.words[2 * j + 1] = static_cast<std::uint32_t>(bits >> 32);
  } else {
    constexpr int kEach = 4 / static_cast<int>(sizeof(Bits));
    const int shift = 8 * static_cast<int>(sizeof(Bits)) * (j % kEach);
    std::uint32_t& word = pack.words[j / kEach];
    word = (word & ~(std::uint32_t{static_cast<Bits>(~Bits{0})} << shift)) | std::uint32_t{bits} << shift;
  }
}

// Aligned to a pack.
template <class Bits>
HOLDFAST_DEVICE Pack load_aligned(const Bits* p) {
#if defined(__CUDACC__)
  const uint4 v = __ldg(reinterpret_cast<const uint4*>(p));
  return {{v.x, v.y, v.z, v.w}};
#else
  Pack pack;
  std::memcpy(&pack, p, sizeof(pack));
  return pack;
#endif
}

// Aligned to its elements, of which there may be fewer than a pack's; zeros follow.
template <class Bits>
HOLDFAST_DEVICE Pack load(const Bits* p, int count) {
  constexpr int kPack = kPackBytes / static_cast<int>(sizeof(Bits));
  Pack pack = {};
  for (int j = 0; j < kPack; ++j) {
    if (j < count) set_element<Bits>(pack, j, p[j]);
  }
  return pack;
}

// The packs of one thread in the order of rows: visit(pack, index in the block of its first element). Several
// are read ahead.
template <class Type, class Visit>
HOLDFAST_DEVICE void walk(const typename Geometry<Type>::Bits* block, int count, bool aligned, int thread,
                          Visit visit) {
  constexpr int kPack = Geometry<Type>::kPack;
  constexpr int kAhead = 8;
  constexpr int kRow = Type::kRow;
  int i = thread * kPack;
  int rows = count / kRow;
  if (aligned) {
    for (; rows >= kAhead; rows -= kAhead, i += kAhead * kRow) {
      Pack packs[kAhead];
      for (int a = 0; a < kAhead; ++a) packs[a] = load_aligned(block + i + a * kRow);
      for (int a = 0; a < kAhead; ++a) visit(packs[a], i + a * kRow);
    }
  } else {
    constexpr int kFew = 2;
    for (; rows >= kFew; rows -= kFew, i += kFew * kRow) {
      Pack packs[kFew];
      for (int a = 0; a < kFew; ++a) packs[a] = load(block + i + a * kRow, kPack);
      for (int a = 0; a < kFew; ++a) visit(packs[a], i + a * kRow);
    }
  }
  for (; i < count; i += kRow) visit(load(block + i, count - i), i);
}

// The same without haste, for blocks that are gone over again: less code.
template <class Type, class Visit>
HOLDFAST_DEVICE void walk_again(const typename Geometry<Type>::Bits* block, int count, int thread,
                                Visit visit) {
  for (int i = thread * Geometry<Type>::kPack; i < count; i += Type::kRow) {
    visit(load(block + i, count - i), i);
  }
}

// Puts zeros in the place of what is not finite. `at` is the part's index in the tensor.
template <class Type, bool kComplex>
HOLDFAST_DEVICE void clean(Pack& pack, std::uint64_t at, Findings& findings) {
  using Format = typename Type::Format;
  using Bits = typename Format::Bits;
  constexpr int kPack = Geometry<Type>::kPack;
  constexpr int kParts = kComplex ? 2 : 1;
  for (int j = 0; j < kPack; j += kParts) {
    FloatClass found = Format::classify(element<Bits>(pack, j));
    if constexpr (kComplex) {
      const FloatClass imaginary = Format::classify(element<Bits>(pack, j + 1));
      if (found == FloatClass::kFinite || imaginary == FloatClass::kNan) found = imaginary;
    }
    if (found == FloatClass::kFinite) continue;
    findings.note(found, (at + static_cast<std::uint64_t>(j)) / kParts);
    for (int k = 0; k < kParts; ++k) set_element<Bits>(pack, j + k, 0);
  }
}

// The lanes folded in halves, from `half` on, in fp64.
template <class Type, class Group>
HOLDFAST_DEVICE double fold_wide(Group& group, int half) {
  constexpr int kPack = Geometry<Type>::kPack;
  for (; half >= kPack; half /= 2) group.add_wide_across(half / kPack);
  double sum = 0;
  group.each([&](Thread<Type>& me) {
    for (int h = half; h > 0; h /= 2) {
      for (int j = 0; j < h; ++j) me.wide[j] += me.wide[j + h];
    }
    sum = me.wide[0];
  });
  return sum;
}

// The first two times in the type they were summed in.
template <class Type, class Group>
HOLDFAST_DEVICE double fold(Group& group) {
  constexpr int kPack = Geometry<Type>::kPack;
  constexpr int kHalf = Type::kRow / 2;
  static_assert(kHalf / 2 >= kPack);  // so that both times it is other threads' lanes
  group.add_across(kHalf / kPack);
  group.add_across(kHalf / 2 / kPack);
  group.each([](Thread<Type>& me) {
    for (int j = 0; j < kPack; ++j) me.wide[j] = me.sums[j];
  });
  return fold_wide<Type>(group, kHalf / 4) * Type::kSumScale;
}

// In fp64, each element multiplied by `scale`; what is not finite is left out.
template <class Type, bool kComplex, class Group>
HOLDFAST_DEVICE double sum_exactly(Group& group, const typename Geometry<Type>::Bits* block, int count,
                                   double scale) {
  using Bits = typename Geometry<Type>::Bits;
  constexpr int kPack = Geometry<Type>::kPack;
  group.each([&](Thread<Type>& me) {
    for (int j = 0; j < kPack; ++j) me.wide[j] = 0;
    walk_again<Type>(block, count, me.index, [&](Pack pack, int) {
      Findings counted_before;
      clean<Type, kComplex>(pack, 0, counted_before);
      for (int j = 0; j < kPack; ++j) {
        const double v = Type::value(element<Bits>(pack, j)) * scale;
        const double square = v * v;
        me.wide[j] += square;
      }
    });
  });
  return fold_wide<Type>(group, Type::kRow / 2);
}

template <class Type>
inline constexpr bool kSumsAgain =
    std::is_same_v<Type, Float64> || std::is_same_v<Type, Float32> || std::is_same_v<Type, BFloat16>;

// The sum of a block of finite elements, or of those that are: again, and scaled or wider, where it is out of
// range or near its lower end. Zeros alone are 0 in any case, and common: they are not read again.
template <class Type, bool kComplex, class Group>
HOLDFAST_DEVICE SumOfSquares settle(Group& group, const typename Geometry<Type>::Bits* block, int count,
                                    bool all_zero, double sum) {
  SumOfSquares squares;
  if constexpr (kSumsAgain<Type>) {
    if (all_zero) return squares;
    if constexpr (std::is_same_v<Type, Float64>) {
      const bool large = sum >= kLarge;
      if (large || sum < kSmall) {
        constexpr double kUp = 0x1p600;
        constexpr double kDown = 0x1p-600;
        static_assert(SumOfSquares::kScale == 600);
        sum = sum_exactly<Type, kComplex>(group, block, count, large ? kDown : kUp);
        (large ? squares.large : squares.small) = sum;
        return squares;
      }
    } else {
      // Not finite is as large as can be.
      if (!(sum <= as_double(Float64Bits::kLargestFinite)) || sum < kTiny) {
        sum = sum_exactly<Type, kComplex>(group, block, count, 1.0);
      }
    }
  }
  squares.medium = sum;
  return squares;
}

struct BlockResult {
  SumOfSquares squares;
  double abs_max = 0;
};

// `count` parts, 1 to Geometry::kBlock; the first is number `at` of the tensor. The result is the same in all
// threads; findings are added to each thread's.
template <class Type, bool kComplex, class Group>
HOLDFAST_DEVICE BlockResult scan_block(Group& group, const typename Geometry<Type>::Bits* block, int count,
                                       bool aligned, std::uint64_t at) {
  group.each([&](Thread<Type>& me) {
    me.clear();
    walk<Type>(block, count, aligned, me.index,
               [&](const Pack& pack, int) { Type::take(pack, me.top, me.sums); });
  });
  auto largest = Type::largest(group.top());
  if (largest > Type::Format::kLargestFinite) {
    group.each([&](Thread<Type>& me) {
      me.clear();
      walk_again<Type>(block, count, me.index, [&](Pack pack, int i) {
        clean<Type, kComplex>(pack, at + static_cast<std::uint64_t>(i), me.findings);
        Type::take(pack, me.top, me.sums);
      });
    });
    largest = Type::largest(group.top());
  }
  const double sum = fold<Type>(group);
  return {settle<Type, kComplex>(group, block, count, largest == 0, sum), Type::value(largest)};
}

// Adds up the blocks of a chunk in order; those behind the tensor's end are zero.
HOLDFAST_DEVICE BlockResult add_blocks(const BlockResult* blocks) {
  BlockResult chunk;
  for (int b = 0; b < kBlocksPerChunk; ++b) {
    chunk.squares.small += blocks[b].squares.small;
    chunk.squares.medium += blocks[b].squares.medium;
    chunk.squares.large += blocks[b].squares.large;
    chunk.abs_max = blocks[b].abs_max > chunk.abs_max ? blocks[b].abs_max : chunk.abs_max;
  }
  return chunk;
}

}  // namespace holdfast::cuda
