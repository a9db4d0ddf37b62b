#include "train/replay.h"

#include <fmt/format.h>
#include <mpi.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <memory>

#include "holdfast/half.h"
#include "holdfast/replay.h"
#include "train/incident_evidence.h"
#include "train/prepare.h"
#include "train/recorded_run.h"
#include "train/replica.h"
#include "train/text_dataset.h"

namespace holdfast::train {
namespace {

// What this trainer's attempt shows, under the names that its bundle has.
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
  // `data`: where the data set is, for a bundle without a batch; empty for nowhere.
  ReplayTrainer trainer(const std::vector<std::string>& data) {
    ReplayTrainer all;
    if (!data.empty())
      all.load_batch = [data](RecordedAttempt* attempt) { return load_batch(data, attempt); };
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
    if (Status s = read_run(attempt, &run_); !s.ok()) return s;
    if (Status s = make_workload(run_.options, &workload_); !s.ok()) return s;
    if (Status s = read_faults(attempt, *workload_, &run_); !s.ok()) return s;
    replica_ = std::make_unique<Replica>(run_.options, *workload_, MPI_COMM_SELF);
    put_batch(attempt, &run_.plan);
    for (std::size_t m = 0; m < run_.plan.rng_keys.size(); ++m) {
      if (Status s = workload_->load_recorded(run_.plan.recorded[m], run_.plan.rng_keys[m]); !s.ok())
        return s;
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

  FaultInjector injector(const RecordedAttempt& attempt) const {
    FaultInjector injector(run_.faults, attempt.rank);
    injector.set_epoch(attempt.subject.epoch);
    return injector;
  }

  void run_attempt(const RecordedAttempt& attempt, ReplayWatcher& watcher) {
    if (!run_.faults.empty()) watcher.note("injected", "faults that were put in on purpose are put in again");
    put_batch(attempt, &run_.plan);
    const FaultInjector faults = injector(attempt);
    LocalAttempt local(*workload_, faults, run_.natural_faults);
    Forwarder forwarder(watcher);
    std::ranges::fill(workload_->gradients(), 0.0f);
    workload_->set_tap(&forwarder);
    local.run(run_.plan, forwarder);
    workload_->set_tap(nullptr);
    if (local.sum_overflow_due(run_.plan)) grow_to_the_limit(workload_->gradients(), run_.options.dtype());
    std::vector<std::uint16_t> scratch;
    for (const BucketSlice& slice : workload_->layout()) {
      watcher.observe(Stage::kBackward, slice.tensor,
                      as_reduced(workload_->gradients(), slice, run_.options.dtype(), &scratch));
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
    if (slice == nullptr || subject.index < 0 || subject.index >= slice->count)
      return watcher.lacks("a tensor of this model");
    const float own =
        rounded(workload_->gradients()[static_cast<std::size_t>(slice->offset + subject.index)]);
    std::vector<float> terms;
    for (const auto& [rank, facts] : attempt.facts) {
      const auto text = facts.find(std::string(fact::kLocalGradient));
      std::uint64_t bits = 0;
      if (text == facts.end() || !text->second.starts_with("0x")) continue;
      const char* const end = text->second.data() + text->second.size();
      if (std::from_chars(text->second.data() + 2, end, bits, 16).ec != std::errc()) continue;
      const bool made_here = rank == attempt.rank || run_.sum_overflow_off;
      terms.push_back(made_here ? own : value_of(bits, configured(attempt, "precision")));
    }
    if (terms.size() != attempt.replicas)
      return watcher.lacks(fmt::format("the gradients of {} ranks at the bad index: there are {}",
                                       attempt.replicas, terms.size()));
    float sum = 0;
    for (const float term : terms) sum = rounded(sum + term);
    injector(attempt).corrupt_piece(Stage::kReduction, run_.plan.attempt, subject.tensor, subject.index,
                                    std::span(&sum, 1));
    watcher.observe(Stage::kReduction, subject.tensor, TensorView::of(std::span(&sum, 1)), -1, subject.index);
  }

  float rounded(float value) const {
    if (run_.options.dtype() == DType::kFloat32) return value;
    std::uint16_t half = 0;
    narrow(std::span(&value, 1), run_.options.dtype(), std::span(&half, 1));
    widen(std::span(&half, 1), run_.options.dtype(), std::span(&value, 1));
    return value;
  }

  // The update of the tensor in which the optimizer made it, without writing it.
  void update_again(const RecordedAttempt& attempt, ReplayWatcher& watcher) {
    const BucketSlice* slice = slice_of(workload_->layout(), attempt.subject.tensor);
    double factor = 0;
    double rate = 0;
    if (slice == nullptr) return watcher.lacks("a tensor of this model");
    if (!read_number(attempt, fact::kGradientFactor, &factor) ||
        !read_number(attempt, fact::kLearningRate, &rate))
      return watcher.lacks("the learning rate and the factor of the gradient");
    const RecordedTensor* seen = attempt.find_seen("gradient/" + std::string(slice->tensor));
    if (seen == nullptr || seen->bytes.size() != static_cast<std::size_t>(slice->count) * sizeof(float))
      return watcher.lacks("the reduced gradient of " + std::string(slice->tensor));
    std::memcpy(workload_->gradients().data() + slice->offset, seen->bytes.data(), seen->bytes.size());
    const UpdateScale scale{static_cast<float>(factor),
                            static_cast<float>(run_.settings.learning_rate.value_or(rate))};
    const FaultInjector faults = injector(attempt);
    const auto see = [&](std::string_view part, std::size_t at, std::span<float> values) {
      const std::int64_t offset = static_cast<std::int64_t>(at) - slice->offset;
      if (part.empty())
        faults.corrupt_piece(Stage::kOptimizer, run_.plan.attempt, slice->tensor, offset, values);
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

  RecordedRun run_;
  std::unique_ptr<Workload> workload_;
  std::unique_ptr<Replica> replica_;
};

}  // namespace

int replay(const Options& options) {
  Client client;
  Replay replay(real_file_system(), options.replay, client.trainer(options.data), options.run_dir);
  const std::vector<std::string>& settings = options.replay_settings;
  const ReplayReport report = options.shrink       ? replay.shrink(settings)
                              : options.one_factor ? replay.one_factor(settings)
                                                   : replay.run(settings);
  fmt::print("{}", report.text);
  return report.exit_code();
}

}  // namespace holdfast::train
