// What the scan is measured against: loops that do less.
#pragma once

#include <cstddef>
#include <cstdint>

namespace holdfast::bench {

// All bits of the memory, or'ed: a plain read, with the widest vectors there are. `bytes` is a multiple of
// 512.
std::uint32_t read_all(const void* memory, std::size_t bytes);

// Sum of squares in fp32, without care for overflow: what a clipping norm alone costs. `count` is a multiple
// of 128.
float norm_alone(const float* values, std::size_t count);

// Sum in fp32: what some trainers look at for NaN, see README.md. `count` is a multiple of 128.
float sum_alone(const float* values, std::size_t count);

}  // namespace holdfast::bench
