// Elementwise optimizers over flat fp32 arrays.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace holdfast::train {

class Optimizer {
 public:
  virtual ~Optimizer() = default;

  // One update, in place. `parameters` and `gradients` have the size given at construction. Each gradient is
  // multiplied by `gradient_scale` first (averaging and clipping). Reads and writes elements independently.
  virtual void step(std::span<float> parameters, std::span<const float> gradients, float gradient_scale,
                    float learning_rate) = 0;

  // Everything that the next update depends on beside its arguments: the moments and the step counter.
  virtual std::vector<std::span<const float>> state() const = 0;
  std::uint64_t steps() const { return steps_; }

 protected:
  std::uint64_t steps_ = 0;
};

struct OptimizerOptions {
  std::string name = "sgd";    // "sgd" or "adamw"
  float momentum = 0.9f;       // sgd
  float beta1 = 0.9f;          // adamw
  float beta2 = 0.999f;        // adamw
  float eps = 1e-8f;           // adamw, added to the root of the second moment
  float weight_decay = 1e-4f;  // sgd: added to the gradient; adamw: decoupled (Loshchilov and Hutter, 2019)
};

std::unique_ptr<Optimizer> make_optimizer(const OptimizerOptions& options, std::size_t parameter_count);

}  // namespace holdfast::train
