// 16-bit floating point, as bits.
#pragma once

#include <cstdint>
#include <span>

#include "holdfast/tensor_view.h"

namespace holdfast::train {

// Rounds to nearest, ties to even. Too large becomes infinite; a NaN stays a NaN of the same sign, quiet.
std::uint16_t to_fp16(float value);
std::uint16_t to_bf16(float value);

float from_fp16(std::uint16_t bits);  // exact
float from_bf16(std::uint16_t bits);  // exact

// Whole arrays of the same length; `dtype` is kFloat16 or kBFloat16.
void narrow(std::span<const float> from, DType dtype, std::span<std::uint16_t> to);
void widen(std::span<const std::uint16_t> from, DType dtype, std::span<float> to);

// to[i] = round(to[i] + from[i]), the sum of two 16-bit numbers being exact enough in fp32 to be rounded
// once.
void add(std::span<const std::uint16_t> from, DType dtype, std::span<std::uint16_t> to);

}  // namespace holdfast::train
