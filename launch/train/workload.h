// What the trainer needs of a model and its data. One object a rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "holdfast/replay.h"
#include "holdfast/step_guard.h"
#include "train/natural_fault.h"

namespace holdfast::train {

// Memory that a forward pass changes beside its outputs, such as BatchNorm statistics.
struct MutableBuffer {
  std::string name;
  void* data = nullptr;
  std::size_t bytes = 0;
  bool is_fp32 = false;  // else integers
};

// One of the tensors that a loaded micro-batch consists of, such as images and labels.
struct BatchTensor {
  std::string name;
  TensorView view;  // `shape` refers to `shape` below
  std::vector<std::int64_t> shape;
};

// Sees what each layer makes, and the gradient that it gets.
class LayerTap {
 public:
  virtual ~LayerTap() = default;
  virtual void activation(std::string_view layer, std::span<const float> values) = 0;
  virtual void gradient(std::string_view layer, std::span<const float> values) = 0;
};

// Over held-out targets; adds over ranks.
struct Score {
  double loss_sum = 0;
  std::int64_t correct = 0;
  std::int64_t total = 0;
};

// The stages of one micro-batch are called in order: load, forward, compute_loss, backward. Each may throw.
// What a stage made may be written to before the next one. Spans stay valid until the next call of the same
// stage, those of the flat arrays for the object's life.
class Workload {
 public:
  virtual ~Workload() = default;

  // Parameters and gradients in flat fp32 arrays of the same layout. Between tensors there may be padding,
  // always zero.
  virtual std::span<float> parameters() = 0;
  virtual std::span<float> gradients() = 0;
  virtual std::span<const BucketSlice> layout() const = 0;
  virtual std::span<const MutableBuffer> buffers() const = 0;

  virtual std::int64_t training_samples() const = 0;

  // Classes of the samples; 0 and -1 for data without.
  virtual int classes() const { return 0; }
  virtual std::int64_t label(std::int64_t /*sample_id*/) const { return -1; }

  // Targets (images, tokens) in these samples: what a mean loss divides by. With variable_targets() false it
  // is the same for every batch of the same size.
  virtual std::int64_t targets(std::span<const std::int64_t> sample_ids) const = 0;
  virtual bool variable_targets() const = 0;

  // Elements of input(), output() and the loss for a batch of this many samples.
  virtual std::int64_t input_elements(std::int64_t batch) const = 0;
  virtual std::int64_t output_elements(std::int64_t batch) const = 0;

  // Everything random in the next micro-batch follows from `rng_key`.
  virtual void load(std::span<const std::int64_t> sample_ids, std::uint64_t rng_key) = 0;
  // What load() took from the data set; and load() with that in place of it. USAGE for what does not fit.
  virtual std::vector<BatchTensor> batch_tensors() = 0;
  virtual Status load_recorded(const std::vector<RecordedTensor>& batch, std::uint64_t rng_key) = 0;
  virtual std::span<float> input() = 0;
  virtual void forward() = 0;
  virtual std::span<float> output() = 0;
  // The sum of the losses of the micro-batch's targets, divided by `denominator`.
  virtual void compute_loss(double denominator) = 0;
  virtual std::span<float, 1> loss() = 0;
  // Adds `scale` times the loss's gradient to gradients().
  virtual void backward(float scale) = 0;

  // While it is set, forward() and backward() show it each layer. Null takes it away.
  virtual void set_tap(LayerTap* tap) = 0;

  // Held-out samples [begin, end), with the statistics as they are.
  virtual Score evaluate(std::int64_t begin, std::int64_t end) = 0;
  virtual std::int64_t test_samples() const = 0;

  // Natural faults that this workload can be set up with. set_fault() comes before targets() and load() of
  // the micro-batch concerned, on the rank concerned, and turns the fault off after it. kDeadUnit changes
  // parameters: it is set once, on every rank, before training, and stays.
  virtual bool supports(NaturalFault fault) const = 0;
  virtual void set_fault(NaturalFault fault, bool on) = 0;

  // The state of the random generator, as bytes.
  virtual std::string rng_state() const = 0;
  // INTERNAL for what rng_state() did not give.
  virtual Status set_rng_state(const std::string& state) = 0;
};

}  // namespace holdfast::train
