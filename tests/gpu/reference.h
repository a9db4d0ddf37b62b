// What the GPU's results are compared with. Compiled without nvcc.
#pragma once

#include <span>
#include <vector>

#include "holdfast/scan.h"

namespace holdfast {

// Of tensors in host memory, by the CPU's scan; where the program was built without Highway, by the walk
// through the kernel's steps that tests/ranks compares with it.
std::vector<Probe> reference(std::span<const TensorView> tensors);

const char* reference_name();

}  // namespace holdfast
