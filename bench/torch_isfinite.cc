#include "torch_isfinite.h"

#include <torch/torch.h>

namespace holdfast::bench {
namespace {

torch::ScalarType type_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat64: return torch::kDouble;
    case DType::kFloat32: return torch::kFloat;
    case DType::kFloat16: return torch::kHalf;
    case DType::kBFloat16: return torch::kBFloat16;
    default: return torch::ScalarType::Undefined;
  }
}

}  // namespace

bool torch_has(DType dtype) { return type_of(dtype) != torch::ScalarType::Undefined; }

bool torch_is_finite(const TensorView& view) {
  torch::NoGradGuard no_grad;
  torch::set_num_threads(1);
  const torch::Tensor tensor =
      torch::from_blob(const_cast<void*>(view.data), {view.element_count}, type_of(view.dtype));
  return torch::isfinite(tensor).all().item<bool>();
}

}  // namespace holdfast::bench
