// How much a manifest may hold. What is larger was not written by us, and is refused before it takes memory.
#pragma once

#include <cstdint>

namespace holdfast {

inline constexpr std::uint64_t kLargestManifest = 256 << 20;
inline constexpr std::uint64_t kMostManifestTensors = 1 << 20;
inline constexpr std::uint64_t kMostManifestRanks = 1 << 20;
inline constexpr std::uint64_t kMostManifestFields = 16 << 20;

}  // namespace holdfast
