// Elementwise optimizers over flat fp32 arrays.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace holdfast::train {

// One update's numbers beside the arrays.
struct UpdateScale {
  float gradient = 1.0f;  // each gradient is multiplied by it first: averaging, unscaling, clipping
  float learning_rate = 0.0f;
};

// An array of the optimizer's state, as long as the parameters.
struct StateArray {
  std::string_view name;  // "momentum", "exp_avg", "exp_avg_sq"
  std::span<float> values;
};

class Optimizer {
 public:
  virtual ~Optimizer() = default;

  // One update, in place, of elements [begin, begin + count) of each array; arrays have the size given at
  // construction. Elements do not depend on each other. Call next_step() once before the pieces of an update.
  virtual void apply(std::size_t begin, std::size_t count, std::span<float> parameters,
                     std::span<const float> gradients, const UpdateScale& scale) = 0;
  void next_step() { ++steps_; }

  // What next_step() and apply() would write, block by block, writing nothing: see(name, offset, values) with
  // the name "" for the parameters, else the state's. The same code as apply(), so the same bits.
  using See = std::function<void(std::string_view name, std::size_t offset, std::span<float> values)>;
  virtual void preview(std::size_t begin, std::size_t count, std::span<const float> parameters,
                       std::span<const float> gradients, const UpdateScale& scale, const See& see) const = 0;

  // Everything that the next update depends on beside its arguments: the moments and the step counter.
  virtual std::vector<StateArray> state() = 0;
  std::uint64_t steps() const { return steps_; }
  void set_steps(std::uint64_t steps) { steps_ = steps; }

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
