#include "train/replay.h"

#include <fmt/format.h>
#include <mpi.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstring>
#include <exception>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>

#include "holdfast/coord/event_log.h"
#include "holdfast/coord/evidence/bundle.h"
#include "holdfast/coord/evidence/evidence.pb.h"
#include "holdfast/coord/generation_id.h"
#include "holdfast/coord/incident.h"
#include "holdfast/coord/printable.h"
#include "holdfast/half.h"
#include "train/incident_evidence.h"
#include "train/prepare.h"
#include "train/replay_settings.h"
#include "train/replica.h"

namespace holdfast::train {
namespace {

using Json = nlohmann::ordered_json;

// The first thing that was not as it should be.
struct Boundary {
  Stage stage = Stage::kInput;
  std::string tensor;
  std::int64_t index = -1;
  BadCounts counts;
  std::string error;  // of an exception, instead of the rest but the stage

  bool operator==(const Boundary&) const = default;
  std::string describe() const {
    if (!error.empty()) return fmt::format("exception at {}: {}", stage_name(stage), printable(error));
    return fmt::format("{} {}[{}]: {} NaN, {} +Inf, {} -Inf", stage_name(stage), printable(tensor), index,
                       counts.nan, counts.pos_inf, counts.neg_inf);
  }
};

// A sum is made again at one index and an update for one tensor, where the rank counted all of its share: of
// their counts no more can be told than that each class was on record.
bool is_again(const Boundary& found, const Boundary& recorded) {
  if (recorded.stage != Stage::kReduction && recorded.stage != Stage::kOptimizer) return found == recorded;
  Boundary of_found = found;
  of_found.counts = recorded.counts;
  const auto on_record = [](std::uint64_t mine, std::uint64_t theirs) { return mine == 0 || theirs > 0; };
  return of_found == recorded && on_record(found.counts.nan, recorded.counts.nan) &&
         on_record(found.counts.pos_inf, recorded.counts.pos_inf) &&
         on_record(found.counts.neg_inf, recorded.counts.neg_inf);
}

// Keeps each stage's first finding, as the guard does, and the layers around it.
class BoundaryWatcher final : public AttemptWatcher, public LayerTap {
 public:
  bool run(Stage stage, const std::function<void()>& body) override {
    if (error_) return false;
    stage_ = stage;
    try {
      body();
    } catch (const std::exception& error) {
      error_ = Boundary{stage, "", -1, {}, error.what()};
    }
    return !error_;
  }
  void micro_batch(int) override {}
  void tensor(Stage stage, std::string_view name, std::span<const float> values) override {
    see(stage, name, scan(TensorView::of(values)));
  }
  void loss(float value) override {
    const double loss = static_cast<double>(value);
    see(Stage::kLoss, "loss", scan(TensorView::of(std::span(&loss, 1))));
  }
  void activation(std::string_view layer, std::span<const float> values) override { bracket(layer, values); }
  void gradient(std::string_view layer, std::span<const float> values) override {
    bracket(std::string(layer) + "/gradient", values);
  }

  void see(Stage stage, std::string_view name, const Probe& probe, std::int64_t offset = 0) {
    if (probe.finite()) return;
    std::optional<Boundary>& first = first_[static_cast<std::size_t>(stage)];
    if (!first) {
      first = Boundary{stage, std::string(name), offset + probe.first_bad, {}, {}};
      tensors_[static_cast<std::size_t>(stage)] = 0;
    }
    // As much as a rank reports: the counts of its first tensors.
    if (tensors_[static_cast<std::size_t>(stage)]++ < static_cast<int>(kMaxFindingsPerRank))
      first->counts += probe.bad;
  }

  std::optional<Boundary> earliest() const {
    for (const auto& first : first_) {
      if (first) return first;
    }
    return error_;
  }
  std::string bracket() const {
    if (dirty_.empty()) return "every layer was finite";
    return fmt::format("last clean layer {}, first dirty {}", clean_.empty() ? "none" : clean_, dirty_);
  }

 private:
  void bracket(std::string_view layer, std::span<const float> values) {
    if (!dirty_.empty()) return;
    (scan(TensorView::of(values)).finite() ? clean_ : dirty_) = layer;
  }

  Stage stage_ = Stage::kInput;
  std::array<std::optional<Boundary>, kStageCount> first_;
  std::array<int, kStageCount> tensors_{};
  std::optional<Boundary> error_;
  std::string clean_, dirty_;
};

template <typename Values>
std::optional<std::string> find(const Values& values, std::string_view name) {
  for (const Named& value : values) {
    if (value.name() == name) return value.value();
  }
  return std::nullopt;
}

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

DType record_dtype(const std::string& dtype) { return dtype == "I64" ? DType::kInt64 : DType::kFloat32; }

class Replay {
 public:
  Replay(const Bundle& bundle, const ReplaySettings& settings)
      : bundle_(bundle), manifest_(bundle.manifest()), settings_(settings) {}

  // Empty, or what is missing.
  std::string prepare() {
    if (manifest_.kind() != "NON_FINITE" && manifest_.kind() != "ERROR") return why_not_the_attempt();
    for (const EvidencePart& part : manifest_.parts()) {
      if (part.is_origin() && origin_ == nullptr) origin_ = &part;
      if (part.rank() == 0) rank_0_ = &part;
    }
    if (origin_ == nullptr) return "no origin rank contributed anything";
    if (const std::string missing = read_recorded(); !missing.empty()) return missing;
    if (const std::string missing = read_options(); !missing.empty()) return missing;
    if (const std::string missing = make_model(); !missing.empty()) return missing;
    return "";
  }

  std::optional<Boundary> recorded() const {
    Boundary boundary;
    boundary.stage = static_cast<Stage>(manifest_.stage());
    // Of an exception on another rank this one has no part: what it saw itself is what it makes again.
    for (const IncidentOrigin& origin : manifest_.origins()) {
      if (origin.rank() != origin_->rank()) continue;
      boundary.stage = static_cast<Stage>(origin.stage());
      boundary.tensor = origin.tensor();
      boundary.index = static_cast<std::int64_t>(origin.index());
      boundary.counts = {origin.nan(), origin.pos_inf(), origin.neg_inf()};
      return boundary;
    }
    if (manifest_.kind() != "ERROR") return std::nullopt;
    boundary.error = manifest_.error();
    return boundary;
  }

  std::optional<Boundary> run() {
    BoundaryWatcher watcher;
    FaultInjector injector(faults_, origin_->rank());
    injector.set_epoch(manifest_.epoch());
    LocalAttempt local(*workload_, injector, natural_);
    std::ranges::fill(workload_->gradients(), 0.0f);
    workload_->set_tap(&watcher);
    local.run(plan_, watcher);
    workload_->set_tap(nullptr);
    if (local.sum_overflow_due(plan_)) grow_to_the_limit(workload_->gradients(), options_.dtype());
    std::vector<std::uint16_t> scratch;
    for (const BucketSlice& slice : workload_->layout()) {
      watcher.see(Stage::kBackward, slice.tensor,
                  scan(as_reduced(workload_->gradients(), slice, options_.dtype(), &scratch)));
    }
    for (const MutableBuffer& buffer : workload_->buffers()) {
      if (!buffer.is_fp32) continue;
      const auto* values = static_cast<const float*>(buffer.data);
      watcher.see(Stage::kForward, buffer.name,
                  scan(TensorView::of(std::span(values, buffer.bytes / sizeof(float)))));
    }
    if (!watcher.earliest()) sum_again(injector, &watcher);
    if (!watcher.earliest()) update_again(injector, &watcher);
    bracket_ = watcher.bracket();
    return watcher.earliest();
  }

  const std::string& bracket() const { return bracket_; }
  std::string weights() { return replica_->digests().substr(0, replica_->digests().find(" buffers=")); }
  int rank() const { return origin_->rank(); }
  bool is_injected() const { return !faults_.empty(); }

 private:
  std::string why_not_the_attempt() const {
    std::string why =
        "what went wrong is the state and not the attempt (" + printable(manifest_.kind()) + ")";
    if (manifest_.has_generation()) {
      why += fmt::format("; the state before it is in checkpoint {}, {} attempts earlier",
                         printable(manifest_.generation()), manifest_.attempts_since_generation());
    }
    return why;
  }

  std::string read_recorded() {
    for (const EvidenceTensor& tensor : origin_->tensors()) {
      if (tensor.role() != EvidenceTensor::BATCH || tensor.micro_batch() < 0 ||
          tensor.micro_batch() >= kMostMicroBatches)
        continue;
      const auto m = static_cast<std::size_t>(tensor.micro_batch());
      if (plan_.recorded.size() <= m) plan_.recorded.resize(m + 1);
      RecordedTensor& to = plan_.recorded[m].emplace_back();
      to.name = tensor.name();
      to.dtype = record_dtype(tensor.dtype());
      to.shape.assign(tensor.shape().begin(), tensor.shape().end());
      if (Status s = bundle_.read(tensor, &to.bytes); !s.ok()) return s.message();
      repair(m, &to);
    }
    if (!plan_.recorded.empty()) return "";
    std::string missing = "the batch of rank " + std::to_string(origin_->rank());
    if (manifest_.compact()) missing += " (the record is compact: later incidents keep no tensors)";
    return missing;
  }

  void repair(std::size_t m, RecordedTensor* tensor) const {
    if (tensor->shape.empty() || tensor->shape[0] <= 0) return;
    const std::size_t row = tensor->bytes.size() / static_cast<std::size_t>(tensor->shape[0]);
    for (const auto& [micro, record] : settings_.repaired) {
      if (static_cast<std::size_t>(micro) != m || record >= tensor->shape[0]) continue;
      std::memset(tensor->bytes.data() + static_cast<std::size_t>(record) * row, 0, row);
    }
  }

  std::string configured(std::string_view name) const {
    return find(manifest_.configuration(), name).value_or("");
  }

  std::string read_options() {
    options_.workload = configured("workload");
    options_.data.clear();  // the batch is recorded
    options_.precision = settings_.precision.value_or(configured("precision"));
    options_.optimizer.name = configured("optimizer");
    const bool known = (options_.workload == "fashion-mnist" || options_.workload == "gpt") &&
                       (options_.optimizer.name == "sgd" || options_.optimizer.name == "adamw") &&
                       parse_whole(configured("batch_size"), &options_.batch) &&
                       parse_whole(configured("micro_batches"), &options_.accumulate) &&
                       parse_whole(configured("seed"), &options_.seed);
    if (!known) return "a configuration of this program";
    for (auto [name, to] : {std::pair{"momentum", &options_.optimizer.momentum},
                            {"beta1", &options_.optimizer.beta1},
                            {"beta2", &options_.optimizer.beta2},
                            {"eps", &options_.optimizer.eps},
                            {"weight_decay", &options_.optimizer.weight_decay}}) {
      double value = 0;
      if (!parse_exact(configured(name), &value)) return std::string("the configuration's ") + name;
      *to = static_cast<float>(value);
    }
    if (settings_.eps) options_.optimizer.eps = static_cast<float>(*settings_.eps);
    plan_.attempt = manifest_.attempt();
    plan_.rank = origin_->rank();
    plan_.loss_scale = settings_.loss_scale.value_or(manifest_.loss_scale());
    if (!read_number(fact::kDenominator, &plan_.denominator)) return "the denominator of the loss";
    for (std::size_t m = 0; m < plan_.recorded.size(); ++m) {
      std::uint64_t key = 0;
      const auto text = find(origin_->facts(), std::string(fact::kRngKey) + std::to_string(m));
      if (!text || !parse_whole(*text, &key))
        return "the random numbers' key of micro-batch " + std::to_string(m);
      plan_.rng_keys.push_back(key);
    }
    plan_.samples.resize(plan_.recorded.size());
    return "";
  }

  bool read_number(std::string_view name, double* value) const {
    const auto text = find(origin_->facts(), name);
    return text && parse_exact(*text, value);
  }

  std::string make_model() {
    if (Status s = make_workload(options_, &workload_); !s.ok()) return s.message();
    for (const std::string& text : lines(configured("natural_faults"))) {
      NaturalFaultSpec spec;
      if (Status s = parse_natural_fault_spec(text, &spec); !s.ok()) return s.message();
      if (settings_.natural_faults) {
        natural_.push_back(std::move(spec));
      } else if (spec.sum_overflow() && spec.due(plan_.rank, plan_.attempt, spec.micro)) {
        sum_overflow_off_ = true;
      }
    }
    if (settings_.injected) {
      const FaultSurface surface = fault_surface(options_, *workload_, static_cast<int>(manifest_.ranks()),
                                                 std::numeric_limits<std::uint64_t>::max());
      for (const std::string& text : lines(configured("faults"))) {
        Fault fault;
        if (Status s = parse_fault(text, &fault); !s.ok()) return s.message();
        if (Status s = resolve_fault(surface, &fault); !s.ok()) return s.message();
        const bool hits = !fault.rank || *fault.rank == origin_->rank();
        // What ends a process tells nothing here.
        if (hits && (fault.kind == Fault::Kind::kValue || fault.kind == Fault::Kind::kThrow))
          faults_.push_back(fault);
      }
    }
    replica_ = std::make_unique<Replica>(options_, *workload_, MPI_COMM_SELF);
    return load_state();
  }

  std::string load_state() {
    TrainingState state = replica_->training_state();
    for (const StateTensor& tensor : state.tensors()) {
      const EvidenceTensor* kept = state_tensor(tensor.name);
      const bool spare = tensor.name.ends_with("/ema");  // not part of an attempt
      if (kept == nullptr && spare) continue;
      std::string bytes;
      if (kept == nullptr) return missing_state(tensor.name);
      if (Status s = bundle_.read(*kept, &bytes); !s.ok()) return s.message();
      if (static_cast<std::int64_t>(bytes.size()) != tensor.bytes())
        return tensor.name + " is of another model";
      std::memcpy(tensor.data, bytes.data(), bytes.size());
    }
    for (const StateBytes& named : state.bytes()) {
      const EvidenceTensor* kept = state_tensor(named.name);
      std::string bytes;
      if (kept == nullptr || named.name == "generator") continue;
      if (Status s = bundle_.read(*kept, &bytes); !s.ok()) return s.message();
      if (Status s = named.load(bytes); !s.ok()) return s.message();
    }
    return "";
  }

  const EvidenceTensor* state_tensor(const std::string& name) const {
    if (rank_0_ == nullptr) return nullptr;
    for (const EvidenceTensor& tensor : rank_0_->tensors()) {
      if (tensor.role() == EvidenceTensor::STATE && tensor.name() == name) return &tensor;
    }
    return nullptr;
  }

  std::string missing_state(const std::string& name) const {
    std::string why = "the state before the attempt (" + printable(name) + ")";
    if (manifest_.has_generation()) {
      why += fmt::format("; checkpoint {} of the run is {} attempts earlier",
                         printable(manifest_.generation()), manifest_.attempts_since_generation());
    }
    return why;
  }

  // A fault that was born in the reduction: the sum of what every rank had at the bad index. This rank's part
  // is the one that was just made, which an experiment may have changed; so is every rank's when all had the
  // same batch because of a fault that is off now.
  void sum_again(const FaultInjector& injector, BoundaryWatcher* watcher) const {
    if (static_cast<Stage>(manifest_.stage()) != Stage::kReduction || manifest_.origins_size() == 0) return;
    const IncidentOrigin& origin = manifest_.origins(0);
    const auto index = static_cast<std::int64_t>(origin.index());
    const BucketSlice* slice = slice_of(workload_->layout(), origin.tensor());
    if (slice == nullptr || index >= slice->count) return;
    const float own = rounded(workload_->gradients()[static_cast<std::size_t>(slice->offset + index)]);
    std::vector<float> terms;
    for (const EvidencePart& part : manifest_.parts()) {
      const auto text = find(part.facts(), fact::kLocalGradient);
      std::uint64_t bits = 0;
      if (!text || !text->starts_with("0x")) continue;
      const auto [end, error] = std::from_chars(text->data() + 2, text->data() + text->size(), bits, 16);
      if (error != std::errc()) continue;
      const bool made_here = &part == origin_ || sum_overflow_off_;
      terms.push_back(made_here ? own : value_of(bits));
    }
    if (terms.size() != manifest_.ranks()) return;
    float sum = 0;
    for (const float term : terms) sum = rounded(sum + term);
    injector.corrupt_piece(Stage::kReduction, plan_.attempt, origin.tensor(), index, std::span(&sum, 1));
    watcher->see(Stage::kReduction, origin.tensor(), scan(TensorView::of(std::span(&sum, 1))), index);
  }

  float value_of(std::uint64_t bits) const {
    const std::string recorded = configured("precision");
    if (recorded == "fp32") {
      float value = 0;
      const auto low = static_cast<std::uint32_t>(bits);
      std::memcpy(&value, &low, sizeof value);
      return value;
    }
    const auto half = static_cast<std::uint16_t>(bits);
    float value = 0;
    widen(std::span(&half, 1), recorded == "fp16" ? DType::kFloat16 : DType::kBFloat16, std::span(&value, 1));
    return value;
  }

  float rounded(float value) const {
    if (options_.dtype() == DType::kFloat32) return value;
    std::uint16_t half = 0;
    narrow(std::span(&value, 1), options_.dtype(), std::span(&half, 1));
    widen(std::span(&half, 1), options_.dtype(), std::span(&value, 1));
    return value;
  }

  // The update of the tensor in which the optimizer made it, without writing it.
  void update_again(const FaultInjector& injector, BoundaryWatcher* watcher) {
    if (static_cast<Stage>(manifest_.stage()) != Stage::kOptimizer || manifest_.origins_size() == 0) return;
    const BucketSlice* slice = slice_of(workload_->layout(), manifest_.origins(0).tensor());
    double factor = 0;
    double rate = 0;
    if (slice == nullptr || !read_number(fact::kGradientFactor, &factor) ||
        !read_number(fact::kLearningRate, &rate))
      return;
    for (const EvidenceTensor& tensor : origin_->tensors()) {
      if (tensor.name() != "gradient/" + std::string(slice->tensor)) continue;
      std::string bytes;
      if (!bundle_.read(tensor, &bytes).ok() ||
          bytes.size() != static_cast<std::size_t>(slice->count) * sizeof(float))
        return;
      std::memcpy(workload_->gradients().data() + slice->offset, bytes.data(), bytes.size());
    }
    const UpdateScale scale{static_cast<float>(factor),
                            static_cast<float>(settings_.learning_rate.value_or(rate))};
    const auto see = [&](std::string_view part, std::size_t at, std::span<float> values) {
      const std::int64_t offset = static_cast<std::int64_t>(at) - slice->offset;
      if (part.empty())
        injector.corrupt_piece(Stage::kOptimizer, plan_.attempt, slice->tensor, offset, values);
      const std::string name = std::string(slice->tensor) + (part.empty() ? "" : "/") + std::string(part);
      watcher->see(Stage::kOptimizer, name, scan(TensorView::of(values)), offset);
    };
    replica_->optimizer().preview(static_cast<std::size_t>(slice->offset),
                                  static_cast<std::size_t>(slice->count), workload_->parameters(),
                                  workload_->gradients(), scale, see);
  }

  static constexpr int kMostMicroBatches = 1024;

  const Bundle& bundle_;
  const BundleManifest& manifest_;
  const ReplaySettings& settings_;
  const EvidencePart* origin_ = nullptr;
  const EvidencePart* rank_0_ = nullptr;
  Options options_;
  AttemptPlan plan_;
  std::vector<Fault> faults_;
  std::vector<NaturalFaultSpec> natural_;
  bool sum_overflow_off_ = false;  // the attempt had it, and the experiment is without
  std::unique_ptr<Workload> workload_;
  std::unique_ptr<Replica> replica_;
  std::string bracket_;
};

const char* result_name(ReplayResult result) {
  switch (result) {
    case ReplayResult::kReproduced: return "REPRODUCED";
    case ReplayResult::kDifferent: return "DIFFERENT";
    case ReplayResult::kNotReproduced: return "NOT_REPRODUCED";
    case ReplayResult::kNotReplayable: return "NOT_REPLAYABLE";
  }
  return "UNKNOWN";
}

// One line, unless the same experiment has been made with the same outcome.
void keep_experiment(const Options& options, const Bundle& bundle, ReplayResult result,
                     const std::string& found) {
  const std::string path = bundle.path() + "/experiments.jsonl";
  Json line = {{"set", options.replay_settings},
               {"input", bundle.content_id()},
               {"result", result_name(result)},
               {"found", found}};
  std::ifstream in(path);
  for (std::string text; std::getline(in, text);) {
    Json before = Json::parse(text, nullptr, false);
    if (!before.is_object()) continue;
    before.erase("event");
    before.erase("time");
    if (before == line) return;
  }
  EventLog log;
  if (log.open(path).ok()) static_cast<void>(log.append("replayed", line));
}

}  // namespace

ReplayResult replay(const Options& options) {
  const auto refuse = [&](const std::string& why) {
    fmt::print("replay {}: NOT_REPLAYABLE\nmissing   {}\n", printable(options.replay), why);
    return ReplayResult::kNotReplayable;
  };
  ReplaySettings settings;
  if (Status s = parse_replay_settings(options.replay_settings, &settings); !s.ok())
    return refuse(s.message());
  std::unique_ptr<Bundle> bundle;
  if (Status s = Bundle::open(real_file_system(), options.replay, &bundle); !s.ok())
    return refuse(s.message());
  if (const auto faults = bundle->verify(); !faults.empty())
    return refuse("it is damaged: " + faults.front());
  Replay replay(*bundle, settings);
  if (const std::string missing = replay.prepare(); !missing.empty()) return refuse(missing);
  const auto recorded = replay.recorded();
  if (!recorded) return refuse("where it was first seen");

  const std::string before = replay.weights();
  const auto found = replay.run();
  ReplayResult result = ReplayResult::kNotReproduced;
  if (found) result = is_again(*found, *recorded) ? ReplayResult::kReproduced : ReplayResult::kDifferent;
  const std::string seen = found ? found->describe() : "everything was finite";
  fmt::print("replay {}: {}\nrecorded  rank {}, {}\nreplayed  {}\nlayers    {}\n", printable(options.replay),
             result_name(result), replay.rank(), recorded->describe(), seen, replay.bracket());
  for (const std::string& text : options.replay_settings) fmt::print("set       {}\n", printable(text));
  if (replay.is_injected()) fmt::print("injected  faults that were put in on purpose are put in again\n");
  fmt::print("weights   {}\n", replay.weights() == before ? "untouched" : "CHANGED");
  if (replay.weights() != before) return ReplayResult::kNotReplayable;
  keep_experiment(options, *bundle, result, seen);
  return result;
}

}  // namespace holdfast::train
