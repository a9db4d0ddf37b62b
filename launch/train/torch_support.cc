#include "train/torch_support.h"

#include <dlfcn.h>

#include <cstring>

#include "train/text_dataset.h"

namespace holdfast::train {
namespace {

constexpr std::int64_t kAlignment = 16;  // elements

}  // namespace

// The BLAS behind libtorch has a thread pool of its own, which at::set_num_threads does not reach.
void use_one_thread() {
  at::set_num_threads(1);
  if (void* set = dlsym(RTLD_DEFAULT, "openblas_set_num_threads")) reinterpret_cast<void (*)(int)>(set)(1);
}

std::span<float> floats(torch::Tensor& tensor) {
  return {tensor.data_ptr<float>(), static_cast<std::size_t>(tensor.numel())};
}

torch::nn::functional::CrossEntropyFuncOptions sum_of_losses() {
  return torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum).ignore_index(kNoTarget);
}

torch::Tensor tapped(torch::Tensor x, const std::string& layer, LayerTap* tap) {
  if (tap == nullptr) return x;
  const auto show = [](const torch::Tensor& tensor, auto&& to) {
    const torch::Tensor dense = tensor.detach().contiguous();
    to(std::span<const float>(dense.data_ptr<float>(), static_cast<std::size_t>(dense.numel())));
  };
  show(x, [&](std::span<const float> values) { tap->activation(layer, values); });
  if (x.requires_grad()) {
    x.register_hook([=](const torch::Tensor& gradient) {
      show(gradient, [&](std::span<const float> values) { tap->gradient(layer, values); });
      return gradient;
    });
  }
  return x;
}

BatchTensor batch_tensor(const char* name, const torch::Tensor& tensor) {
  BatchTensor out{name, {}, {tensor.sizes().begin(), tensor.sizes().end()}};
  const DType dtype = tensor.scalar_type() == torch::kInt64 ? DType::kInt64 : DType::kFloat32;
  out.view = TensorView::contiguous(tensor.data_ptr(), dtype, tensor.numel());
  return out;
}

Status from_record(const std::vector<RecordedTensor>& batch, const char* name, const torch::Tensor& wanted,
                   torch::Tensor* out) {
  const DType dtype = wanted.scalar_type() == torch::kInt64 ? DType::kInt64 : DType::kFloat32;
  for (const RecordedTensor& tensor : batch) {
    if (tensor.name != name) continue;
    const std::vector<std::int64_t>& shape = tensor.shape;
    bool fits =
        tensor.dtype == dtype && static_cast<std::int64_t>(shape.size()) == wanted.dim() && !shape.empty();
    std::int64_t elements = fits ? shape[0] : 0;
    for (std::size_t i = 1; fits && i < shape.size(); ++i) {
      fits = shape[i] == wanted.size(static_cast<std::int64_t>(i));
      elements *= shape[i];
    }
    if (!fits || static_cast<std::int64_t>(tensor.bytes.size()) != elements * dtype_size(dtype)) break;
    *out = torch::empty(shape, wanted.options());
    std::memcpy(out->data_ptr(), tensor.bytes.data(), tensor.bytes.size());
    return Status();
  }
  return Status::usage(std::string("the record has no tensor '") + name + "' that fits this model");
}

std::string torch_rng_state() {
  const torch::Tensor state = at::detail::getDefaultCPUGenerator().get_state();
  return {static_cast<const char*>(state.data_ptr()), state.nbytes()};
}

Status set_torch_rng_state(const std::string& state) {
  const auto size = static_cast<std::int64_t>(state.size());
  const torch::Tensor bytes = torch::empty({size}, torch::kUInt8);
  std::memcpy(bytes.data_ptr(), state.data(), state.size());
  try {
    at::Generator generator = at::detail::getDefaultCPUGenerator();  // a handle
    generator.set_state(bytes);
  } catch (const std::exception& error) {
    return Status::internal(std::string("the state of the random generator: ") + error.what());
  }
  return Status();
}

FlatParameters::FlatParameters(torch::nn::Module& module) {
  const auto parameters = module.named_parameters();
  std::int64_t total = 0;
  for (const auto& parameter : parameters) {
    names_.push_back(parameter.key());
    layout_.push_back({{}, total, parameter.value().numel()});
    total += (parameter.value().numel() + kAlignment - 1) / kAlignment * kAlignment;
  }
  parameters_ = torch::zeros({total});
  gradients_ = torch::zeros({total});
  for (std::size_t i = 0; i < layout_.size(); ++i) {
    BucketSlice& slice = layout_[i];
    slice.tensor = names_[i];
    torch::Tensor tensor = parameters[i].value();
    const auto home = [&](const torch::Tensor& flat) {
      return flat.narrow(0, slice.offset, slice.count).view(tensor.sizes());
    };
    torch::Tensor values = home(parameters_);
    values.copy_(tensor.detach());
    tensor.set_data(values);
    tensor.mutable_grad() = home(gradients_);
  }
}

}  // namespace holdfast::train
