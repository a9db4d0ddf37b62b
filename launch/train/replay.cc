#include "train/replay.h"

#include <fmt/format.h>
#include <mpi.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <limits>
#include <memory>

#include "holdfast/half.h"
#include "holdfast/replay.h"
#include "train/incident_evidence.h"
#include "train/prepare.h"
#include "train/replay_settings.h"
#include "train/replica.h"
#include "train/text_dataset.h"

namespace holdfast::train {
namespace {

constexpr int kMostMicroBatches = 1024;

// What this trainer's attempt shows, under the names that its record has.
class Forwarder final : public AttemptWatcher, public LayerTap {
 public:
  explicit Forwarder(ReplayWatcher& to) : to_(to) {}

  bool run(Stage stage, const std::function<void()>& body) override { return to_.run(stage_ = stage, body); }
  void micro_batch(int index) override { micro_batch_ = index; }
  void tensor(Stage stage, std::string_view name, std::span<const float> values) override {
    to_.observe(stage, name, TensorView::of(values), micro_batch_);
  }
  void loss(float value) override { to_.observe_loss(static_cast<double>(value), micro_batch_); }
  void activation(std::string_view layer, std::span<const float> values) override {
    to_.layer(stage_, EvidenceRecorder::Kind::kActivation, layer, TensorView::of(values), micro_batch_,
              false);
  }
  void gradient(std::string_view layer, std::span<const float> values) override {
    to_.layer(stage_, EvidenceRecorder::Kind::kActivationGradient, std::string(layer) + "/gradient",
              TensorView::of(values), micro_batch_, false);
  }

 private:
  ReplayWatcher& to_;
  Stage stage_ = Stage::kInput;
  int micro_batch_ = 0;
};

std::vector<std::string> lines(const std::string& text) {
  std::vector<std::string> all;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find('\n', at), text.size());
    all.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return all;
}

template <typename Number>
bool parse_whole(const std::string& text, Number* value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
  return error == std::errc() && end == text.data() + text.size();
}

std::string configured(const RecordedAttempt& attempt, const std::string& name) {
  const auto found = attempt.configuration.find(name);
  return found == attempt.configuration.end() ? "" : found->second;
}

bool read_number(const RecordedAttempt& attempt, std::string_view name, double* value) {
  const std::string* text = attempt.fact(name);
  return text != nullptr && parse_exact(*text, value);
}

// In the type that the attempt reduced.
float value_of(std::uint64_t bits, const std::string& precision) {
  float value = 0;
  if (precision == "fp32") {
    const auto low = static_cast<std::uint32_t>(bits);
    std::memcpy(&value, &low, sizeof value);
    return value;
  }
  const auto half = static_cast<std::uint16_t>(bits);
  widen(std::span(&half, 1), precision == "fp16" ? DType::kFloat16 : DType::kBFloat16, std::span(&value, 1));
  return value;
}

class Client {
 public:
  ReplayTrainer trainer() {
    ReplayTrainer all;
    all.prepare = [this](const RecordedAttempt& attempt) { return prepare(attempt); };
    all.state = [this] { return state(); };
    all.run_attempt = [this](const RecordedAttempt& a, ReplayWatcher& watcher) { run_attempt(a, watcher); };
    all.reduce_again = [this](const RecordedAttempt& a, ReplayWatcher& watcher) { reduce_again(a, watcher); };
    all.update_again = [this](const RecordedAttempt& a, ReplayWatcher& watcher) { update_again(a, watcher); };
    all.weights_digest = [this] {
      const std::string digests = replica_->digests();
      return digests.substr(0, digests.find(" buffers="));
    };
    all.blank = blank;
    all.factors = factors;
    all.environment = evidence_environment();
    return all;
  }

 private:
  Status prepare(const RecordedAttempt& attempt) {
    settings_ = {};
    options_ = {};
    plan_ = {};
    sum_overflow_off_ = false;
    if (Status s = parse_replay_settings(attempt.settings, &settings_); !s.ok()) return s;
    if (Status s = read_options(attempt); !s.ok()) return s;
    if (Status s = read_plan(attempt); !s.ok()) return s;
    if (Status s = make_workload(options_, &workload_); !s.ok()) return s;
    if (Status s = read_faults(attempt); !s.ok()) return s;
    replica_ = std::make_unique<Replica>(options_, *workload_, MPI_COMM_SELF);
    set_batch(attempt);
    for (std::size_t m = 0; m < plan_.rng_keys.size(); ++m) {
      if (Status s = workload_->load_recorded(plan_.recorded[m], plan_.rng_keys[m]); !s.ok()) return s;
    }
    return Status();
  }

  Status read_options(const RecordedAttempt& attempt) {
    const auto text = [&](const char* name) { return configured(attempt, name); };
    options_.workload = text("workload");
    options_.data.clear();  // the batch is recorded
    options_.precision = settings_.precision.value_or(text("precision"));
    options_.optimizer.name = text("optimizer");
    const bool known = (options_.workload == "fashion-mnist" || options_.workload == "gpt") &&
                       (options_.optimizer.name == "sgd" || options_.optimizer.name == "adamw") &&
                       parse_whole(text("batch_size"), &options_.batch) &&
                       parse_whole(text("micro_batches"), &options_.accumulate) &&
                       parse_whole(text("seed"), &options_.seed);
    if (!known) return Status::usage("a configuration of this program");
    for (auto [name, to] : {std::pair{"momentum", &options_.optimizer.momentum},
                            {"beta1", &options_.optimizer.beta1},
                            {"beta2", &options_.optimizer.beta2},
                            {"eps", &options_.optimizer.eps},
                            {"weight_decay", &options_.optimizer.weight_decay}}) {
      double value = 0;
      if (!parse_exact(text(name), &value)) return Status::usage(std::string("the configuration's ") + name);
      *to = static_cast<float>(value);
    }
    if (settings_.eps) options_.optimizer.eps = static_cast<float>(*settings_.eps);
    return Status();
  }

  Status read_plan(const RecordedAttempt& attempt) {
    plan_.attempt = attempt.subject.attempt;
    plan_.rank = attempt.rank;
    plan_.loss_scale = settings_.loss_scale.value_or(attempt.loss_scale);
    if (!read_number(attempt, fact::kDenominator, &plan_.denominator))
      return Status::usage("the denominator of the loss");
    int micro_batches = 0;
    for (const RecordedTensor& tensor : attempt.batch) {
      if (tensor.micro_batch < kMostMicroBatches)
        micro_batches = std::max(micro_batches, tensor.micro_batch + 1);
    }
    if (micro_batches != options_.accumulate) {
      return Status::usage(
          fmt::format("the batch of {} micro-batches: there are {}", options_.accumulate, micro_batches));
    }
    for (int m = 0; m < micro_batches; ++m) {
      std::uint64_t key = 0;
      const std::string* text = attempt.fact(std::string(fact::kRngKey) + std::to_string(m));
      if (text == nullptr || !parse_whole(*text, &key))
        return Status::usage("the random numbers' key of micro-batch " + std::to_string(m));
      plan_.rng_keys.push_back(key);
    }
    plan_.samples.resize(plan_.rng_keys.size());
    return Status();
  }

  // What ends a process tells nothing here.
  Status read_faults(const RecordedAttempt& attempt) {
    faults_.clear();
    natural_.clear();
    for (const std::string& text : lines(configured(attempt, "natural_faults"))) {
      NaturalFaultSpec spec;
      if (Status s = parse_natural_fault_spec(text, &spec); !s.ok()) return s;
      if (settings_.natural_faults) {
        natural_.push_back(std::move(spec));
      } else if (spec.sum_overflow() && spec.due(plan_.rank, plan_.attempt, spec.micro)) {
        sum_overflow_off_ = true;
      }
    }
    if (!settings_.injected) return Status();
    const FaultSurface surface = fault_surface(options_, *workload_, static_cast<int>(attempt.ranks),
                                               std::numeric_limits<std::uint64_t>::max());
    for (const std::string& text : lines(configured(attempt, "faults"))) {
      Fault fault;
      if (Status s = parse_fault(text, &fault); !s.ok()) return s;
      if (Status s = resolve_fault(surface, &fault); !s.ok()) return s;
      const bool hits = !fault.rank || *fault.rank == attempt.rank;
      if (hits && (fault.kind == Fault::Kind::kValue || fault.kind == Fault::Kind::kThrow))
        faults_.push_back(fault);
    }
    return Status();
  }

  // The moving average is no part of an attempt, and the generator is set anew for each micro-batch.
  TrainingState state() {
    TrainingState part;
    const TrainingState all = replica_->training_state();
    for (const StateTensor& tensor : all.tensors()) {
      if (!tensor.name.ends_with("/ema")) part.add(tensor);
    }
    for (const StateBytes& bytes : all.bytes()) {
      if (bytes.name != "generator") part.add(bytes);
    }
    return part;
  }

  void set_batch(const RecordedAttempt& attempt) {
    plan_.recorded.assign(plan_.rng_keys.size(), {});
    for (const RecordedTensor& tensor : attempt.batch) {
      if (tensor.micro_batch >= 0 && tensor.micro_batch < std::ssize(plan_.recorded))
        plan_.recorded[static_cast<std::size_t>(tensor.micro_batch)].push_back(tensor);
    }
  }

  FaultInjector injector(const RecordedAttempt& attempt) const {
    FaultInjector injector(faults_, attempt.rank);
    injector.set_epoch(attempt.subject.epoch);
    return injector;
  }

  void run_attempt(const RecordedAttempt& attempt, ReplayWatcher& watcher) {
    if (!faults_.empty()) watcher.note("injected", "faults that were put in on purpose are put in again");
    set_batch(attempt);
    const FaultInjector faults = injector(attempt);
    LocalAttempt local(*workload_, faults, natural_);
    Forwarder forwarder(watcher);
    std::ranges::fill(workload_->gradients(), 0.0f);
    workload_->set_tap(&forwarder);
    local.run(plan_, forwarder);
    workload_->set_tap(nullptr);
    if (local.sum_overflow_due(plan_)) grow_to_the_limit(workload_->gradients(), options_.dtype());
    std::vector<std::uint16_t> scratch;
    for (const BucketSlice& slice : workload_->layout()) {
      watcher.observe(Stage::kBackward, slice.tensor,
                      as_reduced(workload_->gradients(), slice, options_.dtype(), &scratch));
    }
    for (const MutableBuffer& buffer : workload_->buffers()) {
      if (!buffer.is_fp32) continue;
      const auto* values = static_cast<const float*>(buffer.data);
      watcher.observe(Stage::kForward, buffer.name,
                      TensorView::of(std::span(values, buffer.bytes / sizeof(float))));
    }
  }

  // A fault that was born in the reduction: the sum of what every rank had at the bad index. This rank's part
  // is the one that was just made, which an experiment may have changed; so is every rank's when all had the
  // same batch because of a fault that is off now.
  void reduce_again(const RecordedAttempt& attempt, ReplayWatcher& watcher) {
    const EvidenceSubject& subject = attempt.subject;
    const BucketSlice* slice = slice_of(workload_->layout(), subject.tensor);
    if (slice == nullptr || subject.index < 0 || subject.index >= slice->count) return;
    const float own =
        rounded(workload_->gradients()[static_cast<std::size_t>(slice->offset + subject.index)]);
    std::vector<float> terms;
    for (const auto& [rank, facts] : attempt.facts) {
      const auto text = facts.find(std::string(fact::kLocalGradient));
      std::uint64_t bits = 0;
      if (text == facts.end() || !text->second.starts_with("0x")) continue;
      const char* const end = text->second.data() + text->second.size();
      if (std::from_chars(text->second.data() + 2, end, bits, 16).ec != std::errc()) continue;
      const bool made_here = rank == attempt.rank || sum_overflow_off_;
      terms.push_back(made_here ? own : value_of(bits, configured(attempt, "precision")));
    }
    if (terms.size() != attempt.ranks) return;
    float sum = 0;
    for (const float term : terms) sum = rounded(sum + term);
    injector(attempt).corrupt_piece(Stage::kReduction, plan_.attempt, subject.tensor, subject.index,
                                    std::span(&sum, 1));
    watcher.observe(Stage::kReduction, subject.tensor, TensorView::of(std::span(&sum, 1)), -1, subject.index);
  }

  float rounded(float value) const {
    if (options_.dtype() == DType::kFloat32) return value;
    std::uint16_t half = 0;
    narrow(std::span(&value, 1), options_.dtype(), std::span(&half, 1));
    widen(std::span(&half, 1), options_.dtype(), std::span(&value, 1));
    return value;
  }

  // The update of the tensor in which the optimizer made it, without writing it.
  void update_again(const RecordedAttempt& attempt, ReplayWatcher& watcher) {
    const BucketSlice* slice = slice_of(workload_->layout(), attempt.subject.tensor);
    double factor = 0;
    double rate = 0;
    if (slice == nullptr || !read_number(attempt, fact::kGradientFactor, &factor) ||
        !read_number(attempt, fact::kLearningRate, &rate))
      return;
    const RecordedTensor* seen = attempt.find_seen("gradient/" + std::string(slice->tensor));
    if (seen != nullptr && seen->bytes.size() == static_cast<std::size_t>(slice->count) * sizeof(float))
      std::memcpy(workload_->gradients().data() + slice->offset, seen->bytes.data(), seen->bytes.size());
    const UpdateScale scale{static_cast<float>(factor),
                            static_cast<float>(settings_.learning_rate.value_or(rate))};
    const FaultInjector faults = injector(attempt);
    const auto see = [&](std::string_view part, std::size_t at, std::span<float> values) {
      const std::int64_t offset = static_cast<std::int64_t>(at) - slice->offset;
      if (part.empty()) faults.corrupt_piece(Stage::kOptimizer, plan_.attempt, slice->tensor, offset, values);
      const std::string name = std::string(slice->tensor) + (part.empty() ? "" : "/") + std::string(part);
      watcher.observe(Stage::kOptimizer, name, TensorView::of(values), -1, offset);
    };
    replica_->optimizer().preview(static_cast<std::size_t>(slice->offset),
                                  static_cast<std::size_t>(slice->count), workload_->parameters(),
                                  workload_->gradients(), scale, see);
  }

  // Zeros, and no target: it adds nothing to the loss, whose denominator stays what it was.
  static void blank(RecordedTensor& tensor, std::int64_t row) {
    const std::size_t size = tensor.bytes.size() / static_cast<std::size_t>(tensor.shape[0]);
    char* const begin = tensor.bytes.data() + static_cast<std::size_t>(row) * size;
    std::memset(begin, 0, size);
    if (tensor.dtype != DType::kInt64 || (tensor.name != "labels" && tensor.name != "targets")) return;
    for (std::size_t at = 0; at < size; at += sizeof kNoTarget)
      std::memcpy(begin + at, &kNoTarget, sizeof kNoTarget);
  }

  static std::vector<std::string> factors(const RecordedAttempt& attempt) {
    std::vector<std::string> all;
    double rate = 0;
    double eps = 0;
    if (configured(attempt, "precision") != "fp32") all.push_back("precision=fp32");
    if (attempt.loss_scale != 1) all.push_back("loss_scale=1");
    if (read_number(attempt, fact::kLearningRate, &rate))
      all.push_back(fmt::format("learning_rate={:.6g}", rate / 10));
    if (configured(attempt, "optimizer") == "adamw" && parse_exact(configured(attempt, "eps"), &eps))
      all.push_back(fmt::format("eps={:.6g}", std::max(1e-8, 100 * eps)));
    if (!configured(attempt, "faults").empty()) all.push_back("injected=off");
    if (!configured(attempt, "natural_faults").empty()) all.push_back("natural_faults=off");
    return all;
  }

  ReplaySettings settings_;
  Options options_;
  AttemptPlan plan_;
  std::vector<Fault> faults_;
  std::vector<NaturalFaultSpec> natural_;
  bool sum_overflow_off_ = false;  // the attempt had it, and the experiment is without
  std::unique_ptr<Workload> workload_;
  std::unique_ptr<Replica> replica_;
};

}  // namespace

int replay(const Options& options) {
  Client client;
  Replay replay(real_file_system(), options.replay, client.trainer(), options.run_dir);
  const std::vector<std::string>& settings = options.replay_settings;
  const ReplayReport report = options.shrink       ? replay.shrink(settings)
                              : options.one_factor ? replay.one_factor(settings)
                                                   : replay.run(settings);
  fmt::print("{}", report.text);
  return report.exit_code();
}

}  // namespace holdfast::train
