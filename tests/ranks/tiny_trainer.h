// A trainer without any framework, whose attempts are recorded and replayed: a linear model of four features,
// several samples a rank, ranks as threads. Each stage can be made to fail by its data or its numbers.
#pragma once

#include <gtest/gtest.h>

#include <barrier>
#include <cmath>
#include <complex>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "coord/temp_dir.h"
#include "holdfast/replay.h"
#include "ranks/guarded_ranks.h"

namespace holdfast {

inline constexpr int kTinyRanks = 2;
inline constexpr int kTinyBadRank = 1;
inline constexpr int kTinySamples = 8;
inline constexpr int kTinyFeatures = 4;

// Exact, and std::stof() reads it.
inline std::string exact_text(float value) {
  char text[64];
  std::snprintf(text, sizeof text, "%a", static_cast<double>(value));
  return text;
}

// What an attempt of one rank is made of.
struct TinyBatch {
  std::vector<float> x = std::vector<float>(std::size_t{kTinySamples} * kTinyFeatures, 1.0f);
  std::vector<float> weight = std::vector<float>(kTinySamples, 1.0f);  // of each sample in the loss
  float gain = 1;                                                      // of the gradients
  bool throws = false;

  float& at(int sample, int feature) { return x[static_cast<std::size_t>(sample * kTinyFeatures + feature)]; }
};

class TinyTrainer {
 public:
  std::vector<float> weights = {0.5f, -0.25f, 2.0f, 1.0f};
  std::vector<float> square = std::vector<float>(kTinyFeatures, 1.0f);  // the optimizer's, of gradients
  std::vector<float> mean = {0.0f};                                     // forward changes it
  std::vector<float> gradient = std::vector<float>(kTinyFeatures, 0.0f);
  std::vector<float> output = std::vector<float>(kTinySamples, 0.0f);
  std::vector<float> table = std::vector<float>(64, 1.0f);  // larger than a small quota
  std::uint64_t steps = 7;
  float eps = 1e-8f;
  float rate = 0.125f;
  TinyBatch batch;
  bool without_micro_batches = false;  // on record
  bool has_odd_shapes = false;         // in its state
  std::complex<double> phases[2][2] = {};
  float scalar = 0;
  bool has_own_state = false;  // on each rank
  std::vector<float> noise = {0.0f, 0.0f};
  std::string cursor = "0";

  TrainingState state() {
    TrainingState all;
    all.add(StateTensor{.name = "weights", .data = weights.data(), .shape = {kTinyFeatures}});
    all.add(StateTensor{.name = "weights/square",
                        .data = square.data(),
                        .shape = {kTinyFeatures},
                        .is_optimizer_state = true});
    all.add(StateTensor{.name = "mean", .data = mean.data(), .shape = {1}, .forward_mutates = true});
    all.add(StateTensor{.name = "table", .data = table.data(), .shape = {64}});
    all.add(StateBytes{"steps", [this] { return Bytes(reinterpret_cast<const char*>(&steps), sizeof steps); },
                       [this](const Bytes& bytes) {
                         if (bytes.size() != sizeof steps) return Status::usage("steps are damaged");
                         std::memcpy(&steps, bytes.data(), sizeof steps);
                         return Status();
                       }});
    if (has_odd_shapes) {
      all.add(StateTensor{.name = "phases", .data = phases, .dtype = DType::kComplex128, .shape = {2, 2}});
      all.add(StateTensor{.name = "scalar", .data = &scalar, .shape = {}});
    }
    if (!has_own_state) return all;
    all.add(StateTensor{.name = "noise", .data = noise.data(), .shape = {2}, .held = Held::kPerRank});
    all.add(StateBytes{"cursor", [this] { return Bytes(cursor); },
                       [this](const Bytes& bytes) {
                         cursor = bytes;
                         return Status();
                       },
                       Held::kPerRank, true});
    return all;
  }

  // Up to this rank's own gradients; `to` is the guard, or what watches a replay.
  template <typename Sink>
  void local_attempt(Sink& to) {
    if (to.run(Stage::kInput, [] {})) to.observe(Stage::kInput, "x", TensorView::of(batch.x));
    const bool forwarded = to.run(Stage::kForward, [&] {
      if (batch.throws) throw std::runtime_error("bad \x1b record");
      forward();
    });
    if (forwarded) {
      to.observe(Stage::kForward, "output", TensorView::of(output));
      to.observe_loss(loss());
    }
    to.run(Stage::kBackward, [&] { backward(); });
    to.observe(Stage::kBackward, "weights", TensorView::of(gradient));
  }

  std::vector<float> update() const {
    std::vector<float> step(kTinyFeatures);
    for (std::size_t f = 0; f < step.size(); ++f) step[f] = rate * gradient[f] / (std::sqrt(square[f]) + eps);
    return step;
  }

  void apply(const std::vector<float>& step) {
    for (std::size_t f = 0; f < step.size(); ++f) {
      weights[f] -= step[f] / 1024;
      square[f] += gradient[f] * gradient[f];
    }
    ++steps;
  }

  EvidenceProviders providers() {
    EvidenceProviders all;
    all.configuration = {{"model", "tiny"}, {"eps", exact_text(eps)}};
    all.environment = {"HOLDFAST_TINY"};
    all.batch = [this](const EvidenceSubject& subject, EvidenceRecorder& to) {
      const std::int64_t shape[] = {kTinySamples, kTinyFeatures};
      TensorView x = TensorView::of(batch.x);
      x.shape = shape;
      if (without_micro_batches) {
        to.batch("x", x);
        to.batch("weight", TensorView::of(batch.weight));
      } else {
        to.batch("x", x, 0);
        to.batch("weight", TensorView::of(batch.weight), 0);
      }
      to.fact("gain", exact_text(batch.gain));
      to.fact("throws", batch.throws ? "1" : "0");
      to.fact(samples_fact(without_micro_batches ? -1 : 0), "100,101,102,103,104,105,106,107");
      if (subject.stage == Stage::kOptimizer) to.seen("gradient", TensorView::of(gradient));
    };
    all.rerun = [this](const EvidenceSubject& subject, EvidenceRecorder& to) {
      using Kind = EvidenceRecorder::Kind;
      to.layer(Stage::kInput, Kind::kOther, "x", TensorView::of(batch.x), -1, false);
      if (batch.throws) return;
      forward();
      to.layer(Stage::kForward, Kind::kActivation, "output", TensorView::of(output), -1, false);
      const double value = loss();
      to.layer(Stage::kLoss, Kind::kOther, "loss", TensorView::of(std::span(&value, 1)), -1, false);
      backward();
      to.layer(Stage::kBackward, Kind::kParameterGradient, "weights", TensorView::of(gradient), -1, false);
      if (subject.stage == Stage::kReduction)
        to.fact("local", exact_text(gradient[static_cast<std::size_t>(subject.index)]));
    };
    return all;
  }

  // ---- the other side

  ReplayTrainer replayed() {
    ReplayTrainer all;
    all.prepare = [this](const RecordedAttempt& attempt) { return prepare(attempt); };
    all.state = [this] { return state(); };
    all.run_attempt = [this](const RecordedAttempt& attempt, ReplayWatcher& watcher) {
      load(attempt);
      local_attempt(watcher);
    };
    all.reduce_again = [this](const RecordedAttempt& attempt, ReplayWatcher& watcher) {
      float sum = 0;
      for (const auto& [rank, facts] : attempt.facts)
        sum += rank == attempt.rank ? gradient[static_cast<std::size_t>(attempt.subject.index)]
                                    : std::stof(facts.at("local"));
      watcher.observe(Stage::kReduction, attempt.subject.tensor, TensorView::of(std::span(&sum, 1)), -1,
                      attempt.subject.index);
    };
    all.update_again = [this](const RecordedAttempt& attempt, ReplayWatcher& watcher) {
      const RecordedTensor* seen = attempt.find_seen("gradient");
      if (seen == nullptr) return;
      std::memcpy(gradient.data(), seen->bytes.data(), seen->bytes.size());
      const std::vector<float> step = update();
      watcher.observe(Stage::kOptimizer, "weights", TensorView::of(step));
    };
    all.factors = [](const RecordedAttempt&) { return std::vector<std::string>{"gain=1", "eps=0.5"}; };
    all.environment = {"HOLDFAST_TINY"};
    return all;
  }

  Status prepare(const RecordedAttempt& attempt) {
    ++prepared;
    const auto model = attempt.configuration.find("model");
    if (model == attempt.configuration.end() || model->second != "tiny")
      return Status::usage("another model");
    if (attempt.batch.size() != 2) return Status::usage("a part of the batch");
    eps = std::stof(attempt.configuration.at("eps"));
    gain_.reset();
    for (const std::string& text : attempt.settings) {
      if (text == "gain=1") {
        gain_ = 1.0f;
      } else if (text == "eps=0.5") {
        eps = 0.5f;
      } else {
        return Status::usage(text + ": no setting of this trainer");
      }
    }
    return Status();
  }
  int prepared = 0;
  int attempts = 0;

 private:
  void load(const RecordedAttempt& attempt) {
    ++attempts;
    for (const RecordedTensor& tensor : attempt.batch) {
      auto& to = tensor.name == "x" ? batch.x : batch.weight;
      ASSERT_EQ(tensor.bytes.size(), to.size() * sizeof(float));
      std::memcpy(to.data(), tensor.bytes.data(), tensor.bytes.size());
    }
    ASSERT_TRUE(attempt.fact("gain"));
    batch.gain = gain_.value_or(std::stof(*attempt.fact("gain")));
    batch.throws = *attempt.fact("throws") == "1";
  }

  float x(std::size_t sample, std::size_t feature) const { return batch.x[sample * kTinyFeatures + feature]; }

  void forward() {
    for (std::size_t s = 0; s < kTinySamples; ++s) {
      output[s] = 0;
      for (std::size_t f = 0; f < kTinyFeatures; ++f) output[s] += weights[f] * x(s, f);
    }
    mean[0] += 1;
  }
  double loss() const {
    float sum = 0;
    for (std::size_t s = 0; s < kTinySamples; ++s) sum += batch.weight[s] * output[s] * output[s];
    return static_cast<double>(sum);
  }
  void backward() {
    for (std::size_t f = 0; f < kTinyFeatures; ++f) {
      gradient[f] = 0;
      for (std::size_t s = 0; s < kTinySamples; ++s)
        gradient[f] += batch.gain * batch.weight[s] * output[s] * x(s, f);
    }
  }

  std::optional<float> gain_;
};

struct TinyRun {
  std::function<void(TinyTrainer&, int rank)> spoil;  // of the last attempt
  std::function<void(TinyTrainer&)> change = {};      // before the first, the same on every rank
  std::string policy = "";
  int clean_attempts = 1;
  std::uint64_t checkpoint_interval = 0;
  int ranks = kTinyRanks;
  int groups = 1;  // of replicas: rank r is of group r % groups
  // Of the state before the first attempt, of what is not the same on every rank.
  std::function<void(TinyTrainer&, int rank)> divide = {};
};

// Recorded in DIR/run, by ranks as threads. Gives the folder of the bundle.
inline std::string record_tiny(const TempDir& dir, const TinyRun& run) {
  std::barrier<> together(run.ranks);
  std::vector<std::vector<float>> shared(static_cast<std::size_t>(run.ranks));
  GuardOptions options =
      guard_options(std::string(kSkipAnything) + " check_update: BEFORE " + run.policy, dir / "run");
  options.checkpoints.interval_attempts = run.checkpoint_interval;
  const auto attempt = [&](StepGuard& guard, TinyTrainer& trainer, int rank) {
    guard.begin();
    trainer.local_attempt(guard);
    shared[static_cast<std::size_t>(rank)] = trainer.gradient;
    together.arrive_and_wait();
    trainer.gradient.assign(trainer.gradient.size(), 0.0f);
    for (int r = rank % run.groups; r < run.ranks; r += run.groups) {
      for (std::size_t f = 0; f < trainer.gradient.size(); ++f)
        trainer.gradient[f] += shared[static_cast<std::size_t>(r)][f];
    }
    together.arrive_and_wait();
    const BucketSlice layout{"weights", 0, kTinyFeatures};
    guard.observe_share(TensorView::of(trainer.gradient), {&layout, 1});
    const std::vector<float> step = trainer.update();
    guard.observe(Stage::kOptimizer, "weights", TensorView::of(step));
    const Decision decision = guard.decide();
    if (decision.apply()) guard.update([&] { trainer.apply(step); });
    guard.finish();
    return decision.action;
  };
  const auto train = [&](StepGuard& guard, int rank) {
    TinyTrainer trainer;
    if (run.change) run.change(trainer);
    if (run.divide) run.divide(trainer, rank);
    const Status registered = guard.register_state(trainer.state());
    EXPECT_TRUE(registered.ok()) << registered.to_string();
    guard.protect("mean", trainer.mean.data(), DType::kFloat32, 1);
    guard.provide_evidence(trainer.providers());
    for (int i = 0; i < run.clean_attempts; ++i) EXPECT_EQ(attempt(guard, trainer, rank), Action::kApply);
    run.spoil(trainer, rank);
    EXPECT_EQ(attempt(guard, trainer, rank), Action::kSkip);
    EXPECT_TRUE(guard.close().apply());
  };
  ThreadGroup(run.ranks).run([&](Collective& collective) {
    GuardOptions own = options;
    if (run.groups > 1) own.replica_group = collective.rank() % run.groups;
    if (const auto guard = create_guard(collective, own)) train(*guard, collective.rank());
  });
  return dir / ("run/incidents/e0001-a000000000" + std::to_string(run.clean_attempts));
}

}  // namespace holdfast
