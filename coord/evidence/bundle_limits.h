// How much a bundle may hold. What is larger was not written by us, and is refused before it takes memory.
#pragma once

#include <cstdint>

namespace holdfast {

inline constexpr std::uint64_t kLargestBundleManifest = 64 << 20;
// Escaped and spread over lines, a manifest grows by six times at most per byte of text, and by its fields'
// names.
inline constexpr std::uint64_t kLargestBundleText = 1 << 30;
inline constexpr std::uint64_t kMostBundleFields = 4 << 20;
inline constexpr std::uint64_t kMostBundleMessages = 1 << 20;
inline constexpr std::uint64_t kMostBundleRanks = 1 << 20;

}  // namespace holdfast
