// isfinite(x).all() of libtorch, apart from the rest, since a file that includes it takes long to compile.
#pragma once

#include <cstdint>

#include "holdfast/tensor_view.h"

namespace holdfast::bench {

bool torch_has(DType dtype);
bool torch_is_finite(const TensorView& view);  // on one thread

}  // namespace holdfast::bench
