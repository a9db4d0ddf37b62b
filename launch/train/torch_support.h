// What the workloads share of libtorch.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "holdfast/step_guard.h"
#include "train/natural_fault.h"
#include "train/workload.h"

namespace holdfast::train {

// One core a rank: ranks are the parallelism. Call before the first operation.
void use_one_thread();

// By how much weights are too large in NaturalFault::kActivationOverflow. An activation survives it once as
// fp32, but not twice.
inline constexpr float kOvergrowth = 1e25f;

// The elements of a contiguous fp32 tensor.
std::span<float> floats(torch::Tensor& tensor);

// For cross_entropy: a sum over the targets, without those that are kNoTarget.
torch::nn::functional::CrossEntropyFuncOptions sum_of_losses();

// `x`, after it was shown to `tap` (null: nobody), and its gradient will be.
torch::Tensor tapped(torch::Tensor x, const std::string& layer, LayerTap* tap);

// A tensor of a batch for a record, and back. `wanted` gives dtype and, but for the first dimension, shape.
BatchTensor batch_tensor(const char* name, const torch::Tensor& tensor);
Status from_record(const std::vector<RecordedTensor>& batch, const char* name, const torch::Tensor& wanted,
                   torch::Tensor* out);

// The state of the default CPU generator, as bytes.
std::string torch_rng_state();
Status set_torch_rng_state(const std::string& state);

// A module's parameters moved into one flat array, with their gradients in another of the same layout, so
// that optimizer, reduction and scan work on whole arrays. Tensors begin at 64-byte boundaries.
class FlatParameters {
 public:
  explicit FlatParameters(torch::nn::Module& module);
  FlatParameters(const FlatParameters&) = delete;
  FlatParameters& operator=(const FlatParameters&) = delete;

  std::span<float> parameters() { return floats(parameters_); }
  std::span<float> gradients() { return floats(gradients_); }
  std::span<const BucketSlice> layout() const { return layout_; }

 private:
  std::vector<std::string> names_;  // behind layout_
  std::vector<BucketSlice> layout_;
  torch::Tensor parameters_;
  torch::Tensor gradients_;
};

}  // namespace holdfast::train
