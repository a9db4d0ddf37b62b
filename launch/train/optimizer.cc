#include "train/optimizer.h"

#include <cassert>
#include <cmath>

namespace holdfast::train {
namespace {

class Sgd final : public Optimizer {
 public:
  Sgd(const OptimizerOptions& options, std::size_t count) : options_(options), velocity_(count) {}

  void step(std::span<float> parameters, std::span<const float> gradients, float gradient_scale,
            float learning_rate) override {
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const float gradient = gradients[i] * gradient_scale + options_.weight_decay * parameters[i];
      velocity_[i] = options_.momentum * velocity_[i] + gradient;
      parameters[i] -= learning_rate * velocity_[i];
    }
    ++steps_;
  }

  std::vector<std::span<const float>> state() const override { return {velocity_}; }

 private:
  const OptimizerOptions options_;
  std::vector<float> velocity_;
};

class AdamW final : public Optimizer {
 public:
  AdamW(const OptimizerOptions& options, std::size_t count)
      : options_(options), first_(count), second_(count) {}

  void step(std::span<float> parameters, std::span<const float> gradients, float gradient_scale,
            float learning_rate) override {
    ++steps_;
    const auto [beta1, beta2] = std::pair(options_.beta1, options_.beta2);
    const float correction1 = 1.0f - std::pow(beta1, static_cast<float>(steps_));
    const float correction2 = 1.0f - std::pow(beta2, static_cast<float>(steps_));
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const float gradient = gradients[i] * gradient_scale;
      first_[i] = beta1 * first_[i] + (1.0f - beta1) * gradient;
      second_[i] = beta2 * second_[i] + (1.0f - beta2) * gradient * gradient;
      const float direction =
          (first_[i] / correction1) / (std::sqrt(second_[i] / correction2) + options_.eps);
      parameters[i] -= learning_rate * (direction + options_.weight_decay * parameters[i]);
    }
  }

  std::vector<std::span<const float>> state() const override { return {first_, second_}; }

 private:
  const OptimizerOptions options_;
  std::vector<float> first_;
  std::vector<float> second_;
};

}  // namespace

std::unique_ptr<Optimizer> make_optimizer(const OptimizerOptions& options, std::size_t parameter_count) {
  if (options.name == "adamw") return std::make_unique<AdamW>(options, parameter_count);
  assert(options.name == "sgd");
  return std::make_unique<Sgd>(options, parameter_count);
}

}  // namespace holdfast::train
