#include "train/incident_evidence.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <stdexcept>

#include "holdfast/fused_scan.h"
#include "holdfast/replay.h"
#include "train/fault.h"
#include "train/recorded_run.h"

namespace holdfast::train {
namespace {

using Kind = EvidenceRecorder::Kind;

// Watches an attempt that is made again, layer by layer.
class Rerun final : public AttemptWatcher, public LayerTap {
 public:
  Rerun(EvidenceRecorder& to, bool scaled) : to_(to), scaled_(scaled) {}

  bool run(Stage stage, const std::function<void()>& body) override {
    if (failed_) return false;
    stage_ = stage;
    try {
      body();
    } catch (const std::exception& error) {
      failed_ = true;
      error_ = error.what();
      to_.fact("rerun_error", error_);
    }
    return !failed_;
  }
  bool failed() const { return failed_; }
  const std::string& error() const { return error_; }
  void micro_batch(int index) override { micro_batch_ = index; }
  void tensor(Stage stage, std::string_view name, std::span<const float> values) override {
    see(stage, Kind::kActivation, name, values);
  }
  void loss(float value) override {
    const double loss = static_cast<double>(value);
    to_.layer(Stage::kLoss, Kind::kOther, "loss", TensorView::of(std::span(&loss, 1)), micro_batch_, false);
  }
  void activation(std::string_view layer, std::span<const float> values) override {
    see(stage_, Kind::kActivation, layer, values);
  }
  void gradient(std::string_view layer, std::span<const float> values) override {
    see(stage_, Kind::kActivationGradient, std::string(layer) + "/gradient", values);
  }

 private:
  void see(Stage stage, Kind kind, std::string_view name, std::span<const float> values) {
    to_.layer(stage, kind, name, TensorView::of(values), micro_batch_, scaled_ && stage == Stage::kBackward);
  }

  EvidenceRecorder& to_;
  const bool scaled_;
  Stage stage_ = Stage::kInput;
  int micro_batch_ = 0;
  bool failed_ = false;
  std::string error_;
};

std::string joined(const std::vector<std::string>& texts) {
  return fmt::format("{}", fmt::join(texts, "\n"));
}

// Loading and running seed the generator, which is part of what a skip leaves as it was.
class KeptGenerator {
 public:
  explicit KeptGenerator(Workload& workload) : workload_(workload), state_(workload.rng_state()) {}
  ~KeptGenerator() { static_cast<void>(workload_.set_rng_state(state_)); }
  KeptGenerator(const KeptGenerator&) = delete;
  KeptGenerator& operator=(const KeptGenerator&) = delete;

 private:
  Workload& workload_;
  const std::string state_;
};

std::map<std::string, std::string> configuration(const Options& options, int world_size, Workload& workload) {
  const OptimizerOptions& optimizer = options.optimizer;
  return {{"workload", options.workload},
          {"model", fmt::format("{}, {} values in {} tensors", options.workload, workload.parameters().size(),
                                workload.layout().size())},
          {"data", joined(options.data)},
          {"batch", fmt::format("{} samples, {} micro-batches, {} ranks", options.batch, options.accumulate,
                                world_size)},
          {"batch_size", std::to_string(options.batch)},
          {"micro_batches", std::to_string(options.accumulate)},
          {"seed", std::to_string(options.seed)},
          {"objective", options.local_denominator ? "cross-entropy, each rank's own denominator"
                                                  : "cross-entropy, denominator over all ranks"},
          {"precision", options.precision},
          {"optimizer", optimizer.name},
          {"momentum", exact(optimizer.momentum)},
          {"beta1", exact(optimizer.beta1)},
          {"beta2", exact(optimizer.beta2)},
          {"eps", exact(optimizer.eps)},
          {"weight_decay", exact(optimizer.weight_decay)},
          {"clip", exact(options.clip)},
          {"faults", joined(options.faults)},
          {"natural_faults", joined(options.natural_faults)}};
}

// "0x3c00": its bits.
std::string bits_at(const TensorView& view, std::int64_t index) {
  const auto* bytes = static_cast<const unsigned char*>(view.data) + index * dtype_size(view.dtype);
  std::uint64_t bits = 0;
  std::memcpy(&bits, bytes, static_cast<std::size_t>(dtype_size(view.dtype)));
  return fmt::format("{:#x}", bits);
}

}  // namespace

std::string exact(double value) { return fmt::format("{:a}", value); }

bool parse_exact(const std::string& text, double* value) {
  char* end = nullptr;
  *value = std::strtod(text.c_str(), &end);
  return !text.empty() && *end == '\0' && std::isfinite(*value);
}

TensorView as_reduced(std::span<const float> gradients, const BucketSlice& slice, DType dtype,
                      std::vector<std::uint16_t>* scratch) {
  const auto part =
      gradients.subspan(static_cast<std::size_t>(slice.offset), static_cast<std::size_t>(slice.count));
  if (dtype == DType::kFloat32) return TensorView::of(part);
  scratch->resize(part.size());
  narrow_and_scan(part, dtype, *scratch);
  return TensorView::contiguous(scratch->data(), dtype, slice.count);
}

const BucketSlice* slice_of(std::span<const BucketSlice> layout, std::string_view name) {
  for (const BucketSlice& slice : layout) {
    if (name == slice.tensor ||
        (name.starts_with(slice.tensor) && name.substr(slice.tensor.size()).starts_with("/"))) {
      return &slice;
    }
  }
  return nullptr;
}

std::vector<std::string> evidence_environment() {
  return {"OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OPENBLAS_CORETYPE",
          "ATEN_CPU_CAPABILITY"};
}

// Layer by layer, and no update. Throws when it comes to an end before the subject.
void make_again(const Options& options, Workload& workload, LocalAttempt& local, const AttemptPlan& plan,
                const EvidenceSubject& subject, EvidenceRecorder& to) {
  const KeptGenerator kept(workload);
  const bool scaled = plan.loss_scale != 1;
  Rerun watcher(to, scaled);
  std::ranges::fill(workload.gradients(), 0.0f);
  workload.set_tap(&watcher);
  try {
    local.run(plan, watcher);
  } catch (...) {
    workload.set_tap(nullptr);
    for (int m = 0; m < static_cast<int>(plan.rng_keys.size()); ++m) local.set_natural_faults(plan, m, false);
    throw;
  }
  workload.set_tap(nullptr);
  if (local.sum_overflow_due(plan)) grow_to_the_limit(workload.gradients(), options.dtype());
  std::vector<std::uint16_t> scratch;
  for (const BucketSlice& slice : workload.layout()) {
    const TensorView view = as_reduced(workload.gradients(), slice, options.dtype(), &scratch);
    to.layer(Stage::kBackward, Kind::kParameterGradient, slice.tensor, view, -1, scaled);
    if (subject.stage == Stage::kReduction && slice.tensor == subject.tensor && subject.index < slice.count) {
      to.fact(fact::kLocalGradient, bits_at(view, subject.index));
    }
  }
  // Of an attempt that threw in the first place, throwing is what was to be found.
  if (watcher.failed() && subject.index >= 0 && !to.found_again(subject))
    throw std::runtime_error(watcher.error());
}

EvidenceProviders evidence_providers(const Options& options, int world_size, const Preparation& prepared,
                                     LocalAttempt& local, const AttemptPlan& plan, const UpdateScale& scale) {
  Workload& workload = *prepared.workload;
  const std::vector<NaturalFaultSpec>& natural_faults = prepared.natural_faults;
  EvidenceProviders providers;
  providers.configuration = configuration(options, world_size, workload);
  providers.injected = options.faults;
  providers.environment = evidence_environment();
  providers.batch = [&](const EvidenceSubject& subject, EvidenceRecorder& to) {
    const KeptGenerator kept(workload);
    // What the update was to be made of is in the gradients, until they are made again.
    const BucketSlice* slice = slice_of(workload.layout(), subject.tensor);
    if (subject.stage == Stage::kOptimizer && slice != nullptr) {
      std::vector<std::uint16_t> none;
      to.seen("gradient/" + std::string(slice->tensor),
              as_reduced(workload.gradients(), *slice, DType::kFloat32, &none));
    }
    to.fact(fact::kGradientFactor, exact(scale.gradient));
    to.fact(fact::kLearningRate, exact(scale.learning_rate));
    to.fact(fact::kDenominator, exact(plan.denominator));
    for (int m = 0; m < static_cast<int>(plan.rng_keys.size()); ++m) {
      const auto at = static_cast<std::size_t>(m);
      to.fact(std::string(fact::kSamples) + std::to_string(m),
              fmt::format("{}", fmt::join(plan.samples[at], ",")));
      to.fact(std::string(fact::kRngKey) + std::to_string(m), std::to_string(plan.rng_keys[at]));
      local.set_natural_faults(plan, m, true);
      try {
        local.load(plan, m);
        for (const BatchTensor& tensor : workload.batch_tensors()) {
          TensorView view = tensor.view;
          view.shape = tensor.shape;
          to.batch(tensor.name, view, m);
        }
      } catch (...) {
        local.set_natural_faults(plan, m, false);
        throw;
      }
      local.set_natural_faults(plan, m, false);
    }
  };
  providers.rerun = [&, again = faults_made_again(prepared.faults)](const EvidenceSubject& subject,
                                                                    EvidenceRecorder& to) {
    FaultInjector faults(again, plan.rank);
    faults.set_epoch(subject.epoch);
    LocalAttempt attempt(workload, faults, natural_faults);
    make_again(options, workload, attempt, plan, subject, to);
  };
  providers.rerun_recorded = [&, of_the_data = faults_of_the_data(prepared.faults)](
                                 const RecordedAttempt& recorded, EvidenceRecorder& to) {
    RecordedRun run;
    run.options.accumulate = options.accumulate;
    if (Status s = read_plan(recorded, &run); !s.ok()) throw std::runtime_error("no " + s.message());
    put_batch(recorded, &run.plan);
    FaultInjector faults(of_the_data, recorded.rank);
    faults.set_epoch(recorded.subject.epoch);
    LocalAttempt attempt(workload, faults, natural_faults);
    make_again(options, workload, attempt, run.plan, recorded.subject, to);
  };
  return providers;
}

}  // namespace holdfast::train
