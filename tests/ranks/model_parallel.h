// A small trainer with all three kinds of parallelism on eight ranks, 2 x 2 x 2: two data-parallel replicas
// (dp) of a pipeline of two stages (pp), each split over two ranks (tp). Real gradients, real Adam, no
// library.
//
// A stage is y = row(tanh(column(x))): the first layer is split by columns, so each half has its own hidden
// values, and the second by rows, so that the halves' outputs add up to the stage's.
#pragma once

#include <array>
#include <cmath>
#include <limits>
#include <optional>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "holdfast/step_guard.h"

namespace holdfast::model_parallel {

inline constexpr int kRanks = 8;

// Ranks are numbered (dp, pp, tp).
struct Place {
  int rank;
  int dp = rank / 4;
  int pp = rank / 2 % 2;
  int tp = rank % 2;
  std::map<std::string, int> axes() const { return {{"dp", dp}, {"pp", pp}, {"tp", tp}}; }
  std::string group() const { return "pp=" + std::to_string(pp) + ",tp=" + std::to_string(tp); }
  int replica() const { return (rank + 4) % kRanks; }  // the other one
  int neighbour() const { return rank ^ 2; }           // in the pipeline
};

// The trainer's own communication. Each call is blocking, and ends at some time: by an abort when nobody
// answers.
class Fabric {
 public:
  virtual ~Fabric() = default;
  virtual void all_reduce(char axis, std::span<float> values) = 0;  // 't' or 'd'
  virtual void all_gather_dp(std::span<const float> half, std::span<float> whole) = 0;
  virtual void send(int to, std::span<const float> values) = 0;
  virtual void receive(int from, std::span<float> values) = 0;
};

// Writes down what is called.
class RecordingFabric final : public Fabric {
 public:
  explicit RecordingFabric(Fabric& inner) : inner_(inner) {}
  void all_reduce(char axis, std::span<float> values) override {
    calls += axis;
    inner_.all_reduce(axis, values);
  }
  void all_gather_dp(std::span<const float> half, std::span<float> whole) override {
    calls += 'g';
    inner_.all_gather_dp(half, whole);
  }
  void send(int to, std::span<const float> values) override {
    calls += 's';
    inner_.send(to, values);
  }
  void receive(int from, std::span<float> values) override {
    calls += 'r';
    inner_.receive(from, values);
  }
  std::string calls;

 private:
  Fabric& inner_;
};

enum class Where {
  kInput,
  kForward,
  kBackward,
  kReduction,  // finite on both replicas, and not in the sum
  kReduced,    // on one rank alone, in its memory, after the sum
  kUpdate,     // in what the optimizer computes, before or after it is written
  kThrowForward,
  kThrowBackward
};

struct Fault {
  std::uint64_t attempt = 0;
  int rank = 0;
  Where where = Where::kInput;
  float value = 0;
};

using Values = std::vector<float>;

class Trainer {
 public:
  static constexpr std::size_t kBatch = 4;
  static constexpr std::size_t kWidth = 6;
  static constexpr std::size_t kHidden = 4;  // of one half
  static constexpr std::size_t kLayer = kHidden * kWidth;
  static constexpr std::size_t kParameters = 2 * kLayer;
  static constexpr std::size_t kShard = kParameters / 2;

  // `sharded`: each replica keeps moments of, and updates, half of the parameters (ZeRO-1).
  Trainer(Place place, Fabric& fabric, bool sharded)
      : place_(place), fabric_(fabric), sharded_(sharded), parameters_(kParameters), gradient_(kParameters) {
    std::mt19937 random(static_cast<unsigned>(1 + place.pp * 2 + place.tp));
    std::uniform_real_distribution<float> weight(-0.5f, 0.5f);
    for (float& w : parameters_) w = weight(random);
    begin_ = sharded ? static_cast<std::size_t>(place.dp) * kShard : 0;
    count_ = sharded ? kShard : kParameters;
    average_.resize(count_);
    square_.resize(count_);
  }

  std::vector<BucketSlice> layout() const { return {{column_, 0, kLayer}, {row_, kLayer, kLayer}}; }
  Values& parameters() { return parameters_; }
  Values& average() { return average_; }
  std::optional<Fault> fault;

  // All that training depends on, bit for bit.
  std::string state() const {
    std::string bytes;
    for (const Values* values : {&parameters_, &average_, &square_}) {
      bytes.append(reinterpret_cast<const char*>(values->data()), values->size() * sizeof(float));
    }
    return bytes;
  }

  TrainingState registered() {
    TrainingState state;
    const auto add = [&](const std::string& name, float* data, std::size_t count, Held held,
                         bool of_optimizer) {
      StateTensor tensor{
          .name = name, .data = data, .shape = {static_cast<std::int64_t>(count)}, .held = held};
      tensor.is_optimizer_state = of_optimizer;
      if (held == Held::kSharded) {
        tensor.shard_offset = static_cast<std::int64_t>(begin_);
        tensor.shard_total = kParameters;
      }
      state.add(tensor);
    };
    add(column_, parameters_.data(), kLayer, Held::kReplicated, false);
    add(row_, parameters_.data() + kLayer, kLayer, Held::kReplicated, false);
    const Held held = sharded_ ? Held::kSharded : Held::kReplicated;
    add("exp_avg", average_.data(), count_, held, true);
    add("exp_avg_sq", square_.data(), count_, held, true);
    return state;
  }

  // One attempt with the data of number `data`, up to the decision and the update that it allows.
  Decision attempt(StepGuard& guard, std::uint64_t data) {
    guard.begin();
    forward(guard, data);
    backward(guard);
    const auto slices = layout();
    guard.observe_bucket(Stage::kBackward, TensorView::of(gradient_), slices);
    fabric_.all_reduce('d', gradient_);
    if (const float* value = strikes(Where::kReduced, data))
      gradient_[place_.dp == 0 ? 0 : kParameters - 1] = *value;
    guard.observe_share(TensorView::of(gradient_), slices);
    if (guard.checks_update_before()) {
      compute_update(guard.updates() + 1, data);
      guard.observe(Stage::kOptimizer, "update", TensorView::of(new_parameters_));
      guard.observe(Stage::kOptimizer, "new exp_avg", TensorView::of(new_average_));
    }
    const Decision decision = guard.decide();
    if (decision.apply()) {
      guard.update([&] { update(guard, data); });
      if (sharded_) fabric_.all_gather_dp(std::span(parameters_).subspan(begin_, count_), whole());
    }
    return decision;
  }

 private:
  // The value to put there; null for none.
  const float* strikes(Where where, std::uint64_t data) const {
    const bool now = fault && fault->attempt == data && fault->where == where;
    const bool here = now && (fault->rank == place_.rank ||
                              (where == Where::kReduction && fault->rank == place_.replica()));
    return here ? &fault->value : nullptr;
  }
  void maybe_throw(Where where, std::uint64_t data) const {
    if (strikes(where, data)) throw std::runtime_error("out of memory");
  }

  Values samples(std::uint64_t data) const {
    std::mt19937 random(
        static_cast<unsigned>(data * 100 + static_cast<unsigned>(place_.dp * 10 + place_.pp)));
    std::uniform_real_distribution<float> value(-1, 1);
    Values values(kBatch * kWidth);
    for (float& v : values) v = value(random);
    return values;
  }

  void forward(StepGuard& guard, std::uint64_t data) {
    data_ = data;
    Values own;  // what this stage reads: samples, or what they should become
    guard.run(Stage::kInput, [&] { own = samples(data); });
    own.resize(kBatch * kWidth);
    if (const float* value = strikes(Where::kInput, data)) own[1] = *value;
    guard.observe(Stage::kInput, place_.pp == 0 ? "samples" : "targets", TensorView::of(own));
    input_ = own;
    if (place_.pp == 1) fabric_.receive(place_.neighbour(), input_);

    Values output(kBatch * kWidth);
    guard.run(Stage::kForward, [&] {
      maybe_throw(Where::kThrowForward, data);
      hidden_.assign(kBatch * kHidden, 0);
      for (std::size_t b = 0; b < kBatch; ++b) {
        for (std::size_t h = 0; h < kHidden; ++h) {
          float sum = 0;
          for (std::size_t i = 0; i < kWidth; ++i) sum += column(h, i) * input_[b * kWidth + i];
          hidden_[b * kHidden + h] = std::tanh(sum);
        }
        for (std::size_t o = 0; o < kWidth; ++o) {
          for (std::size_t h = 0; h < kHidden; ++h)
            output[b * kWidth + o] += row(o, h) * hidden_[b * kHidden + h];
        }
      }
    });
    if (const float* value = strikes(Where::kForward, data)) output[2] = *value;
    guard.observe(Stage::kForward, "output", TensorView::of(output));  // this half's
    if (!guard.healthy()) output.assign(kBatch * kWidth, 0);
    fabric_.all_reduce('t', output);

    output_gradient_.assign(kBatch * kWidth, 0);
    if (place_.pp == 0) {
      fabric_.send(place_.neighbour(), output);
      fabric_.receive(place_.neighbour(), output_gradient_);
      return;
    }
    double loss = 0;
    for (std::size_t i = 0; i < output.size(); ++i) {
      const float error = output[i] - own[i];
      loss += static_cast<double>(error) * static_cast<double>(error) / (kBatch * kWidth);
      output_gradient_[i] = 2 * error / (kBatch * kWidth);
    }
    guard.observe_loss(loss);
  }

  void backward(StepGuard& guard) {
    Values input_gradient(kBatch * kWidth);
    gradient_.assign(kParameters, 0);
    guard.run(Stage::kBackward, [&] {
      maybe_throw(Where::kThrowBackward, data_);
      for (std::size_t b = 0; b < kBatch; ++b) {
        for (std::size_t h = 0; h < kHidden; ++h) {
          const float value = hidden_[b * kHidden + h];
          float sum = 0;
          for (std::size_t o = 0; o < kWidth; ++o) {
            const float error = output_gradient_[b * kWidth + o];
            gradient_[kLayer + o * kHidden + h] += error * value;
            sum += row(o, h) * error;
          }
          sum *= 1 - value * value;
          for (std::size_t i = 0; i < kWidth; ++i) {
            gradient_[h * kWidth + i] += sum * input_[b * kWidth + i];
            input_gradient[b * kWidth + i] += column(h, i) * sum;
          }
        }
      }
    });
    if (!guard.healthy()) {
      gradient_.assign(kParameters, 0);
      input_gradient.assign(kBatch * kWidth, 0);
    }
    fabric_.all_reduce('t', input_gradient);
    if (place_.pp == 1) fabric_.send(place_.neighbour(), input_gradient);
    if (const float* value = strikes(Where::kBackward, data_)) gradient_[5] = *value;
    if (strikes(Where::kReduction, data_)) {
      gradient_[7] = gradient_[kParameters - 2] = std::numeric_limits<float>::max();
    }
  }

  // Of this rank's part, into new_*.
  void compute_update(std::uint64_t number, std::uint64_t data) {
    const auto t = static_cast<double>(number);
    const auto correction = static_cast<float>(std::sqrt(1 - std::pow(0.999, t)) / (1 - std::pow(0.9, t)));
    new_parameters_.resize(count_);
    new_average_.resize(count_);
    new_square_.resize(count_);
    for (std::size_t i = 0; i < count_; ++i) {
      const float g = gradient_[begin_ + i] / 2;
      new_average_[i] = 0.9f * average_[i] + 0.1f * g;
      new_square_[i] = 0.999f * square_[i] + 0.001f * g * g;
      new_parameters_[i] = parameters_[begin_ + i] -
                           0.01f * correction * new_average_[i] / (std::sqrt(new_square_[i]) + 1e-8f);
    }
    if (const float* value = strikes(Where::kUpdate, data)) new_average_[3] = *value;
  }

  void update(StepGuard& guard, std::uint64_t data) {
    const bool is_computed = guard.checks_update_before();
    if (!is_computed) compute_update(guard.updates() + 1, data);
    std::copy(new_parameters_.begin(), new_parameters_.end(),
              parameters_.begin() + static_cast<std::ptrdiff_t>(begin_));
    average_ = new_average_;
    square_ = new_square_;
    if (is_computed) return;
    guard.observe_written("parameters",
                          TensorView::of(std::span<const float>(parameters_).subspan(begin_, count_)));
    guard.observe_written("exp_avg", TensorView::of(average_));
  }

  std::span<float> whole() { return parameters_; }
  float column(std::size_t h, std::size_t i) const { return parameters_[h * kWidth + i]; }
  float row(std::size_t o, std::size_t h) const { return parameters_[kLayer + o * kHidden + h]; }

  const Place place_;
  Fabric& fabric_;
  const bool sharded_;
  const std::string prefix_ = "stage" + std::to_string(place_.pp) + ".half" + std::to_string(place_.tp);
  const std::string column_ = prefix_ + ".column";
  const std::string row_ = prefix_ + ".row";
  std::uint64_t data_ = 0;
  std::size_t begin_ = 0;  // of what this rank updates
  std::size_t count_ = 0;
  Values parameters_, gradient_, average_, square_;
  Values input_, hidden_, output_gradient_;
  Values new_parameters_, new_average_, new_square_;
};

}  // namespace holdfast::model_parallel
