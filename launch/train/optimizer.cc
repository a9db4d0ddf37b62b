#include "train/optimizer.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <cmath>

namespace holdfast::train {
namespace {

// A rule updates one element: the parameter, and its kStates state values.
struct SgdRule {
  static constexpr std::array<std::string_view, 1> kStates = {"momentum"};

  SgdRule(const OptimizerOptions& o, std::uint64_t, const UpdateScale& s)
      : momentum(o.momentum), weight_decay(o.weight_decay), scale(s) {}

  void operator()(float& parameter, float gradient, std::array<float*, 1> state) const {
    const float g = gradient * scale.gradient + weight_decay * parameter;
    *state[0] = momentum * *state[0] + g;
    parameter -= scale.learning_rate * *state[0];
  }

  const float momentum;
  const float weight_decay;
  const UpdateScale scale;
};

struct AdamWRule {
  static constexpr std::array<std::string_view, 2> kStates = {"exp_avg", "exp_avg_sq"};

  AdamWRule(const OptimizerOptions& o, std::uint64_t step, const UpdateScale& s)
      : options(o),
        correction1(1.0f - std::pow(o.beta1, static_cast<float>(step))),
        correction2(1.0f - std::pow(o.beta2, static_cast<float>(step))),
        scale(s) {}

  void operator()(float& parameter, float gradient, std::array<float*, 2> state) const {
    const float g = gradient * scale.gradient;
    float& first = *state[0];
    float& second = *state[1];
    first = options.beta1 * first + (1.0f - options.beta1) * g;
    second = options.beta2 * second + (1.0f - options.beta2) * g * g;
    const float direction = (first / correction1) / (std::sqrt(second / correction2) + options.eps);
    parameter -= scale.learning_rate * (direction + options.weight_decay * parameter);
  }

  const OptimizerOptions& options;
  const float correction1;
  const float correction2;
  const UpdateScale scale;
};

template <typename Rule>
class Elementwise final : public Optimizer {
 public:
  Elementwise(const OptimizerOptions& options, std::size_t count) : options_(options) {
    for (auto& array : state_) array.resize(count);
  }

  void apply(std::size_t begin, std::size_t count, std::span<float> parameters,
             std::span<const float> gradients, const UpdateScale& scale) override {
    Pointers state;
    for (std::size_t s = 0; s < kStates; ++s) state[s] = state_[s].data() + begin;
    run(Rule(options_, steps_, scale), parameters.data() + begin, gradients.data() + begin, state, count);
  }

  void preview(std::size_t begin, std::size_t count, std::span<const float> parameters,
               std::span<const float> gradients, const UpdateScale& scale, const See& see) const override {
    constexpr std::size_t kBlock = 4096;
    const Rule rule(options_, steps_ + 1, scale);
    std::vector<float> scratch[1 + kStates];
    for (std::size_t at = begin; at < begin + count; at += kBlock) {
      const std::size_t n = std::min(kBlock, begin + count - at);
      Pointers state;
      scratch[0].assign(parameters.begin() + at, parameters.begin() + at + n);
      for (std::size_t s = 0; s < kStates; ++s) {
        scratch[1 + s].assign(state_[s].begin() + at, state_[s].begin() + at + n);
        state[s] = scratch[1 + s].data();
      }
      run(rule, scratch[0].data(), gradients.data() + at, state, n);
      see("", at, scratch[0]);
      for (std::size_t s = 0; s < kStates; ++s) see(Rule::kStates[s], at, scratch[1 + s]);
    }
  }

  std::vector<StateArray> state() override {
    std::vector<StateArray> arrays;
    for (std::size_t s = 0; s < kStates; ++s) arrays.push_back({Rule::kStates[s], state_[s]});
    return arrays;
  }

 private:
  static constexpr std::size_t kStates = Rule::kStates.size();
  using Pointers = std::array<float*, kStates>;

  static void run(const Rule& rule, float* parameters, const float* gradients, Pointers state,
                  std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
      Pointers element;
      for (std::size_t s = 0; s < kStates; ++s) element[s] = state[s] + i;
      rule(parameters[i], gradients[i], element);
    }
  }

  const OptimizerOptions options_;
  std::array<std::vector<float>, kStates> state_;
};

}  // namespace

std::unique_ptr<Optimizer> make_optimizer(const OptimizerOptions& options, std::size_t parameter_count) {
  if (options.name == "adamw") return std::make_unique<Elementwise<AdamWRule>>(options, parameter_count);
  assert(options.name == "sgd");
  return std::make_unique<Elementwise<SgdRule>>(options, parameter_count);
}

}  // namespace holdfast::train
