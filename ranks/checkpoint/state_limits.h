// What a part of a training state may be called and be made of, for whoever declares one and whoever reads
// one back.
#pragma once

#include <cstddef>
#include <string_view>

namespace holdfast {

inline constexpr std::size_t kLongestStateName = 4096;
// complex128 is stored with one dimension more, and safetensors has 64.
inline constexpr std::size_t kMostStateDimensions = 63;
inline constexpr std::string_view kReservedStateName = "__metadata__";  // in safetensors

}  // namespace holdfast
