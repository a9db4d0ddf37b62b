// The smallest trainer whose incidents can be made again: fits y = a . x on one rank; at attempt 50 one of
// its samples is too large, the step is skipped, and what it was made of is kept.
//
//   replay_minimal RUN_DIR                                         trains and records
//   replay_minimal --replay RUN_DIR/incidents/e0001-a0000000050    makes that attempt again
//   replay_minimal --shrink RUN_DIR/incidents/e0001-a0000000050    and finds the sample
#include <array>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>

#include "holdfast/collectives/thread_collective.h"
#include "holdfast/replay.h"
#include "holdfast/step_guard.h"

namespace {
using namespace holdfast;  // an example

constexpr int kFeatures = 4;
constexpr int kSamples = 16;
constexpr std::int64_t kBatchShape[] = {kSamples, kFeatures};

// What is trained, and what an attempt makes of it.
struct Model {
  std::array<float, kFeatures> weights{};
  std::array<float, kFeatures> gradient{};
  std::array<float, kSamples> errors{};
  std::array<float, kSamples * kFeatures> batch{};
  void load(int attempt) {
    std::mt19937 random(static_cast<unsigned>(attempt));
    std::normal_distribution<float> normal;
    for (float& x : batch) x = normal(random);
    if (attempt == 50) batch[11 * kFeatures + 2] = 3e38f;
  }
  TensorView batch_view() const {
    return {batch.data(), DType::kFloat32, kSamples * kFeatures, kBatchShape, {}};
  }

  // One attempt, told to the guard in training and to the watcher in a replay.
  template <typename Sink>
  void attempt(Sink& to) {
    to.observe(Stage::kInput, "batch", batch_view());
    gradient.fill(0);
    errors.fill(0);
    for (int s = 0; s < kSamples; ++s)
      for (int i = 0; i < kFeatures; ++i)
        errors[s] += (weights[i] - static_cast<float>(i + 1)) * batch[s * kFeatures + i];
    to.observe(Stage::kForward, "errors", TensorView::of(errors));
    for (int s = 0; s < kSamples; ++s)
      for (int i = 0; i < kFeatures; ++i) gradient[i] += 2 * errors[s] * batch[s * kFeatures + i] / kSamples;
    to.observe(Stage::kBackward, "weights", TensorView::of(gradient));
  }
  void update() {
    for (int i = 0; i < kFeatures; ++i) weights[i] -= 0.1f * gradient[i];
  }
  TrainingState state() {
    TrainingState all;
    all.add(StateTensor{.name = "weights", .data = weights.data(), .shape = {kFeatures}});
    return all;
  }
};

int train(const std::string& run_dir) {
  int exit_code = 0;
  ThreadGroup(1).run([&](Collective& collective) {
    Model model;
    GuardOptions options;
    options.run_dir = run_dir;
    std::unique_ptr<StepGuard> guard;
    Status status = StepGuard::create(collective, options, &guard);
    if (status.ok()) status = guard->register_state(model.state());
    if (!status.ok()) std::fprintf(stderr, "%s\n", status.to_string().c_str());
    if ((exit_code = status.exit_code()) != 0) return;
    EvidenceProviders providers;
    providers.batch = [&](const EvidenceSubject&, EvidenceRecorder& to) {
      to.batch("batch", model.batch_view(), 0);
    };
    guard->provide_evidence(std::move(providers));
    for (int i = 0; i < 100 && exit_code == 0; ++i) {
      guard->begin();
      model.load(i);
      model.attempt(*guard);
      const Decision decision = guard->decide();
      if (decision.apply()) guard->update([&] { model.update(); });
      if (!decision.apply()) std::printf("attempt %d: %s\n", i, decision.reason.c_str());
      guard->finish();
      if (decision.ends_run()) exit_code = decision.exit_code();
    }
    if (exit_code == 0) exit_code = guard->close().exit_code();
  });
  return exit_code;
}

int replay(const std::string& bundle, bool shrink) {
  Model model;
  ReplayTrainer trainer;
  trainer.state = [&] { return model.state(); };  // filled as recorded, before each run
  trainer.run_attempt = [&](const RecordedAttempt& attempt, ReplayWatcher& watcher) {
    const Bytes& bytes = attempt.batch.at(0).bytes;
    if (bytes.size() != sizeof model.batch) throw std::runtime_error("a batch of another model");
    std::memcpy(model.batch.data(), bytes.data(), bytes.size());
    model.attempt(watcher);
  };
  Replay again(real_file_system(), bundle, trainer);
  const ReplayReport report = shrink ? again.shrink() : again.run();
  std::fputs(report.text.c_str(), stdout);
  return report.exit_code();
}

}  // namespace

int main(int argc, char** argv) {
  const std::string first = argc > 1 ? argv[1] : "runs/replay_minimal";
  if (argc == 3 && (first == "--replay" || first == "--shrink")) return replay(argv[2], first == "--shrink");
  return train(first);
}
