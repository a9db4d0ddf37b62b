// An attempt that was recorded by a real guard, made again by the library.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "coord/events.h"
#include "ranks/checkpoint/forwarding_file_system.h"
#include "ranks/tiny_trainer.h"

namespace holdfast {
namespace {

void only(int rank, const std::function<void()>& body) {
  if (rank == kTinyBadRank) body();
}

// The fault of each stage, by nature.
TinyRun at_input() {
  return {.spoil = [](TinyTrainer& t, int rank) { only(rank, [&] { t.batch.at(2, 1) = kNanF; }); }};
}
TinyRun at_forward() {
  return {.spoil = [](TinyTrainer& t, int rank) { only(rank, [&] { t.batch.at(5, 2) = -3e38f; }); }};
}
TinyRun at_loss() {
  return {.spoil = [](TinyTrainer& t, int rank) { only(rank, [&] { t.batch.at(3, 2) = 1e30f; }); }};
}
TinyRun at_backward() {
  return {.spoil = [](TinyTrainer& t, int rank) { only(rank, [&] { t.batch.gain = 3e38f; }); }};
}
TinyRun at_reduction() {
  return {.spoil = [](TinyTrainer& t, int) { t.batch.gain = 1e37f; }};
}
TinyRun at_optimizer() {
  TinyRun run;
  run.change = [](TinyTrainer& t) { t.eps = t.square[3] = 0; };
  run.spoil = [](TinyTrainer& t, int) {
    for (int s = 0; s < kTinySamples; ++s) t.batch.at(s, 3) = 0;
  };
  run.clean_attempts = 0;
  return run;
}
TinyRun that_throws() {
  return {.spoil = [](TinyTrainer& t, int rank) { only(rank, [&] { t.batch.throws = true; }); }};
}

ReplayReport replay(const std::string& bundle, TinyTrainer& trainer,
                    const std::vector<std::string>& settings = {}) {
  return Replay(real_file_system(), bundle, trainer.replayed()).run(settings);
}

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

// Reproduced with the same bits, and says all of this.
void expect_reproduced(const TinyRun& run, const Boundary& wanted) {
  const TempDir dir;
  const std::string bundle = record_tiny(dir, run);
  TinyTrainer trainer;
  const ReplayReport report = replay(bundle, trainer);
  EXPECT_EQ(report.result, ReplayResult::kReproduced) << report.text;
  EXPECT_EQ(report.exit_code(), 0);
  ASSERT_TRUE(report.found && report.recorded) << report.text;
  EXPECT_EQ(*report.found, wanted) << report.text;
  EXPECT_EQ(first_line(report.text), "replay " + bundle + ": REPRODUCED");
  EXPECT_NE(report.text.find("\nreplayed  " + wanted.describe() + "\n"), std::string::npos) << report.text;
  EXPECT_NE(report.text.find("\nweights   untouched\n"), std::string::npos) << report.text;
  EXPECT_TRUE(report.same_environment);
  EXPECT_EQ(report.bits, Bits::kSame) << report.text;
  EXPECT_EQ(trainer.attempts, 1);
}

TEST(Replay, AValueOfTheInput) { expect_reproduced(at_input(), {Stage::kInput, "x", 9, {1, 0, 0}, ""}); }

TEST(Replay, AValueOfForward) {
  expect_reproduced(at_forward(), {Stage::kForward, "output", 5, {0, 0, 1}, ""});
}

TEST(Replay, TheLoss) { expect_reproduced(at_loss(), {Stage::kLoss, "loss", 0, {0, 1, 0}, ""}); }

TEST(Replay, AGradient) { expect_reproduced(at_backward(), {Stage::kBackward, "weights", 0, {0, 4, 0}, ""}); }

TEST(Replay, ASumThatOverflows) {
  expect_reproduced(at_reduction(), {Stage::kReduction, "weights", 0, {0, 1, 0}, ""});
}

TEST(Replay, AnUpdate) {
  expect_reproduced(at_optimizer(), {Stage::kOptimizer, "weights", 3, {1, 0, 0}, ""});
}

TEST(Replay, AnException) {
  expect_reproduced(that_throws(), {Stage::kForward, "", -1, {}, "bad \x1b record"});
}

TEST(Replay, SaysBetweenWhichLayersItBegan) {
  const TempDir dir;
  TinyTrainer trainer;
  const ReplayReport report = replay(record_tiny(dir, at_forward()), trainer);
  EXPECT_EQ(report.last_clean, "x");
  EXPECT_EQ(report.first_dirty, "output");
  EXPECT_NE(report.text.find("\nlayers    last clean layer x, first dirty output\n"), std::string::npos);
}

TEST(Replay, WithoutItsCauseItIsNotReproduced) {
  const TempDir dir, other;
  const std::string value = record_tiny(dir, at_input());
  const std::string gain = record_tiny(other, at_backward());
  TinyTrainer trainer;
  const ReplayReport repaired = replay(value, trainer, {"sample.0.2=0"});
  EXPECT_EQ(repaired.result, ReplayResult::kNotReproduced) << repaired.text;
  EXPECT_EQ(repaired.exit_code(), 2);
  EXPECT_NE(repaired.text.find("\nreplayed  everything was finite\n"), std::string::npos);
  EXPECT_NE(repaired.text.find("\nset       sample.0.2=0\n"), std::string::npos);
  EXPECT_EQ(replay(value, trainer, {"sample.0.1=0"}).result, ReplayResult::kReproduced);
  EXPECT_EQ(replay(gain, trainer, {"gain=1"}).result, ReplayResult::kNotReproduced);
  EXPECT_EQ(replay(gain, trainer, {"sample.0.1=0"}).result, ReplayResult::kReproduced);
}

TEST(Replay, AnotherPlaceIsDifferent) {
  const TempDir dir;
  const std::string bundle = record_tiny(dir, at_input());
  TinyTrainer trainer;
  ReplayTrainer elsewhere = trainer.replayed();
  elsewhere.run_attempt = [](const RecordedAttempt& attempt, ReplayWatcher& watcher) {
    std::vector<float> x(32, 1.0f);
    const bool moved = attempt.settings.empty() || attempt.settings[0] == "eps=0.5";
    x[moved ? 8 : 9] = attempt.settings.size() < 2 ? kNanF : kInfF;
    watcher.observe(Stage::kInput, "x", TensorView::of(x));
  };
  Replay again(real_file_system(), bundle, elsewhere);
  EXPECT_EQ(again.run().result, ReplayResult::kDifferent);
  EXPECT_EQ(again.run().exit_code(), 1);
  EXPECT_EQ(again.run({"gain=1"}).result, ReplayResult::kReproduced);
  EXPECT_EQ(again.run({"eps=0.5"}).result, ReplayResult::kDifferent) << "another index";
  EXPECT_EQ(again.run({"gain=1", "gain=1"}).result, ReplayResult::kDifferent) << "another class";
  elsewhere.run_attempt = [](const RecordedAttempt&, ReplayWatcher&) { throw std::runtime_error("broken"); };
  const ReplayReport thrown = Replay(real_file_system(), bundle, elsewhere).run();
  EXPECT_EQ(thrown.result, ReplayResult::kDifferent);
  EXPECT_NE(thrown.text.find("\nreplayed  exception at input: broken\n"), std::string::npos) << thrown.text;
}

TEST(Replay, AnEarlierStageIsDifferent) {
  const TempDir dir;
  const std::string bundle = record_tiny(dir, at_loss());
  TinyTrainer trainer;
  ReplayTrainer earlier = trainer.replayed();
  earlier.run_attempt = [run = earlier.run_attempt](const RecordedAttempt& attempt, ReplayWatcher& watcher) {
    run(attempt, watcher);
    watcher.observe(Stage::kForward, "mean", TensorView::of(std::span(&kInfF, 1)));
  };
  EXPECT_EQ(Replay(real_file_system(), bundle, earlier).run().result, ReplayResult::kDifferent);
}

TEST(Replay, OtherBitsAreDifferentWhereTheEnvironmentIsTheSame) {
  ASSERT_EQ(unsetenv("HOLDFAST_TINY"), 0);
  const TempDir dir;
  const std::string bundle = record_tiny(dir, at_loss());
  TinyTrainer trainer;
  ReplayTrainer blurred = trainer.replayed();
  blurred.run_attempt = [&, run = blurred.run_attempt](const RecordedAttempt& attempt,
                                                       ReplayWatcher& watcher) {
    run(attempt, watcher);
    const std::vector<float> output(kTinySamples, 1.0f);
    watcher.layer(Stage::kForward, EvidenceRecorder::Kind::kActivation, "output", TensorView::of(output), -1,
                  false);
  };
  const ReplayReport here = Replay(real_file_system(), bundle, blurred).run();
  EXPECT_EQ(here.bits, Bits::kDiffer);
  EXPECT_TRUE(here.same_environment);
  EXPECT_EQ(here.result, ReplayResult::kDifferent);
  EXPECT_NE(
      here.text.find("\nbits      differ, first in forward output; the environment is the recorded one\n"),
      std::string::npos)
      << here.text;

  ASSERT_EQ(setenv("HOLDFAST_TINY", "1\n2", 1), 0);
  const ReplayReport elsewhere = Replay(real_file_system(), bundle, blurred).run();
  ASSERT_EQ(unsetenv("HOLDFAST_TINY"), 0);
  EXPECT_EQ(elsewhere.result, ReplayResult::kReproduced) << elsewhere.text;
  EXPECT_EQ(elsewhere.bits, Bits::kDiffer);
  EXPECT_FALSE(elsewhere.same_environment);
  EXPECT_NE(
      elsewhere.text.find("; another environment: variable.HOLDFAST_TINY was not set, here it is 1\\x0a2\n"),
      std::string::npos)
      << elsewhere.text;
}

TEST(Replay, StateIsThatBeforeTheAttemptInEachRun) {
  const TempDir dir;
  const std::string bundle = record_tiny(dir, at_input());
  TinyTrainer trainer;
  trainer.weights = {9, 9, 9, 9};
  ReplayTrainer looking = trainer.replayed();
  std::vector<float> means;
  looking.run_attempt = [&, run = looking.run_attempt](const RecordedAttempt& attempt,
                                                       ReplayWatcher& watcher) {
    means.push_back(trainer.mean[0]);
    EXPECT_EQ(trainer.steps, 8u);  // one update after the 7 of the beginning
    EXPECT_NE(trainer.weights[0], 9.0f);
    run(attempt, watcher);
  };
  Replay again(real_file_system(), bundle, looking);
  EXPECT_EQ(again.run().result, ReplayResult::kReproduced);
  EXPECT_EQ(again.run().result, ReplayResult::kReproduced);
  EXPECT_EQ(means, (std::vector<float>{means.at(0), means.at(0)}));
  EXPECT_EQ(trainer.prepared, 1) << "made anew only for other settings";
}

// ---- what cannot be replayed

void expect_missing(const std::string& bundle, const ReplayTrainer& trainer, const std::string& what,
                    const std::vector<std::string>& settings = {}) {
  const ReplayReport report = Replay(real_file_system(), bundle, trainer).run(settings);
  EXPECT_EQ(report.result, ReplayResult::kNotReplayable) << report.text;
  EXPECT_EQ(report.exit_code(), 3);
  EXPECT_NE(report.missing.find(what), std::string::npos) << report.text;
  EXPECT_EQ(report.text.find("\nmissing   ") != std::string::npos, true) << report.text;
  EXPECT_FALSE(std::filesystem::exists(bundle + "/experiments.jsonl"));
}

TEST(Replay, EveryDamagedByteOfAFileIsSeen) {
  const TempDir dir;
  const std::string bundle = record_tiny(dir, at_input());
  TinyTrainer trainer;
  for (const auto& entry : std::filesystem::directory_iterator(bundle)) {
    const std::string path = entry.path().string();
    const std::string whole = read_file(path);
    std::string damaged = whole;
    damaged[damaged.size() / 2] = static_cast<char>(damaged[damaged.size() / 2] ^ 1);
    write_file(path, damaged);
    expect_missing(bundle, trainer.replayed(), entry.path().filename().string());
    write_file(path, whole);
  }
  EXPECT_EQ(trainer.prepared, 0) << "nothing unverified was given to the trainer";
  EXPECT_EQ(replay(bundle, trainer).result, ReplayResult::kReproduced);
  expect_missing(dir / "nowhere", trainer.replayed(), "no folder");
}

TEST(Replay, ACompactBundleSaysThatTheBatchIsMissing) {
  const TempDir dir;
  TinyRun run = at_input();
  run.policy = "evidence { full_incidents: 0 }";
  TinyTrainer trainer;
  expect_missing(record_tiny(dir, run), trainer.replayed(),
                 "the batch of rank 1 (the bundle is compact: it holds no tensors)");
}

TEST(Replay, ABatchThatTheQuotaHasCutIsNotReplayedInPart) {
  const TempDir dir;
  TinyRun run = at_input();
  run.policy = "evidence { bundle_quota_bytes: 100 }";  // x has 128, the weights of the samples 32
  TinyTrainer trainer;
  expect_missing(record_tiny(dir, run), trainer.replayed(), "a part of the batch");
}

TEST(Replay, AStateThatTheQuotaHasCutIsMissing) {
  const TempDir dir;
  TinyRun run = at_input();
  run.policy = "evidence { bundle_quota_bytes: 320 }";
  TinyTrainer trainer;
  expect_missing(record_tiny(dir, run), trainer.replayed(),
                 "the state before the attempt (table); the bundle names no checkpoint");
}

TEST(Replay, AStateThatTheQuotaHasCutIsTakenFromTheCheckpointRightBefore) {
  const TempDir dir;
  TinyRun run = at_forward();
  run.policy = "evidence { bundle_quota_bytes: 320 }";
  run.checkpoint_interval = 1000;  // the first one is that of the beginning
  run.clean_attempts = 0;
  run.change = [](TinyTrainer& t) { t.steps = 9; };
  const std::string bundle = record_tiny(dir, run);
  TinyTrainer trainer;
  const ReplayReport report = replay(bundle, trainer);
  EXPECT_EQ(report.result, ReplayResult::kReproduced) << report.text;
  EXPECT_EQ(report.bits, Bits::kSame) << report.text;
  EXPECT_NE(report.text.find("\nstate     of checkpoint e0001-a0000000000\n"), std::string::npos)
      << report.text;
  EXPECT_EQ(trainer.steps, 9u);

  // Elsewhere, with and without the run's folder.
  const std::string moved = dir / "e0001-a0000000000";
  std::filesystem::rename(bundle, moved);
  std::filesystem::remove(moved + "/experiments.jsonl");
  expect_missing(moved, trainer.replayed(), "checkpoint e0001-a0000000000 of the run is not in ");
  const ReplayReport told = Replay(real_file_system(), moved, trainer.replayed(), dir / "run").run();
  EXPECT_EQ(told.result, ReplayResult::kReproduced) << told.text;
  std::filesystem::remove(moved + "/experiments.jsonl");

  // Damaged.
  const std::string part = dir / "run/checkpoints/e0001-a0000000000/replicated.safetensors";
  std::string bytes = read_file(part);
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  write_file(part, bytes);
  const ReplayReport damaged = Replay(real_file_system(), moved, trainer.replayed(), dir / "run").run();
  EXPECT_EQ(damaged.result, ReplayResult::kNotReplayable) << damaged.text;
  EXPECT_NE(damaged.missing.find("checkpoint e0001-a0000000000 of the run is not clean: "), std::string::npos)
      << damaged.text;
}

TEST(Replay, ACheckpointThatIsNotRightBeforeTheAttemptIsNotTaken) {
  const TempDir dir;
  TinyRun run = at_forward();
  run.policy = "evidence { bundle_quota_bytes: 320 }";
  run.checkpoint_interval = 1000;
  TinyTrainer trainer;
  expect_missing(
      record_tiny(dir, run), trainer.replayed(),
      "the state before the attempt (table); checkpoint e0001-a0000000000 of the run is 1 attempts "
      "earlier");
}

TEST(Replay, ATrainerMayRefuse) {
  const TempDir dir;
  const std::string bundle = record_tiny(dir, at_input());
  TinyTrainer trainer;
  ReplayTrainer refusing = trainer.replayed();
  refusing.prepare = [](const RecordedAttempt&) { return Status::usage("not \x1b mine"); };
  expect_missing(bundle, refusing, "not \\x1b mine");
  refusing.prepare = [](const RecordedAttempt&) -> Status { throw std::runtime_error("no memory"); };
  expect_missing(bundle, refusing, "prepare failed: no memory");
  refusing = trainer.replayed();
  refusing.state = {};
  refusing.weights_digest = [] { return std::string("same"); };
  refusing.load_state = [](const RecordedTensor& tensor) {
    return tensor.name == "mean" ? Status::usage(tensor.name + " is of another model") : Status();
  };
  expect_missing(bundle, refusing, "mean is of another model");
  refusing.load_state = [](const RecordedTensor&) -> Status { throw 7; };
  expect_missing(bundle, refusing, "load_state failed: exception of unknown type");
  expect_missing(bundle, trainer.replayed(), "gain=2: no setting of this trainer", {"gain=2"});
  expect_missing(bundle, trainer.replayed(), "sample.0.8=0: the batch has no such sample", {"sample.0.8=0"});
  expect_missing(bundle, trainer.replayed(), "sample.1.0=0: the batch has no such sample", {"sample.1.0=0"});
  expect_missing(bundle, ReplayTrainer(), "a trainer that can make an attempt");
  EXPECT_EQ(trainer.attempts, 0);
}

TEST(Replay, WhatTheAttemptLacksAndWhatNoTrainerMakesAgainIsMissing) {
  const TempDir dir;
  const std::string sum = record_tiny(dir, at_reduction());
  TinyTrainer trainer;
  ReplayTrainer lacking = trainer.replayed();
  lacking.reduce_again = {};
  expect_missing(sum, lacking, "a trainer that makes the sum again");
  lacking.reduce_again = [](const RecordedAttempt&, ReplayWatcher& watcher) {
    watcher.lacks("\x1b of rank 0");
  };
  expect_missing(sum, lacking, "\\x1b of rank 0");
}

TEST(Replay, ACompactBundleIsReplayedWithABatchThatTheTrainerMakesAgain) {
  const TempDir dir;
  TinyRun run = at_input();
  run.policy = "evidence { full_incidents: 0 }";
  run.checkpoint_interval = 1000;
  run.clean_attempts = 0;
  const std::string bundle = record_tiny(dir, run);
  TinyTrainer trainer;
  ReplayTrainer loading = trainer.replayed();
  expect_missing(bundle, loading, "the batch of rank 1 (the bundle is compact");
  loading.load_batch = [](RecordedAttempt*) -> Status { throw 7; };
  expect_missing(bundle, loading, "holds no tensors); exception of unknown type");
  loading.load_batch = [](RecordedAttempt*) -> Status { throw std::runtime_error("no data \x1b"); };
  expect_missing(bundle, loading, "holds no tensors); no data \\x1b");
  loading.load_batch = [](RecordedAttempt* attempt) {
    EXPECT_NE(attempt->fact("samples.0"), nullptr);
    TinyBatch batch;
    batch.at(2, 1) = kNanF;
    const auto bytes = [](const std::vector<float>& values) {
      return Bytes(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
    };
    attempt->batch = {{"x", DType::kFloat32, {kTinySamples, kTinyFeatures}, bytes(batch.x), 0},
                      {"weight", DType::kFloat32, {kTinySamples}, bytes(batch.weight), 0}};
    return Status();
  };
  const ReplayReport report = Replay(real_file_system(), bundle, loading).shrink();
  EXPECT_EQ(report.result, ReplayResult::kReproduced) << report.text;
  EXPECT_EQ(report.samples, (std::vector<RecordedSample>{{0, 2}}));
  EXPECT_NE(report.text.find("\nbatch     made again by the trainer: the bundle holds none\n"),
            std::string::npos);
}

TEST(Replay, WhatIsThrownOutsideOfAStageIsOfTheOneThatRanLast) {
  const TempDir dir;
  const std::string bundle = record_tiny(dir, that_throws());
  TinyTrainer trainer;
  ReplayTrainer throwing = trainer.replayed();
  throwing.run_attempt = [](const RecordedAttempt&, ReplayWatcher& watcher) {
    watcher.run(Stage::kForward, [] {});
    throw std::runtime_error("bad \x1b record");
  };
  EXPECT_EQ(Replay(real_file_system(), bundle, throwing).run({"gain=1"}).result, ReplayResult::kReproduced);
  throwing.run_attempt = [](const RecordedAttempt&, ReplayWatcher& watcher) {
    EXPECT_FALSE(watcher.run(Stage::kForward, [] { throw std::runtime_error("bad \x1b record"); }));
    EXPECT_FALSE(watcher.run(Stage::kBackward, [] { ADD_FAILURE() << "it had failed"; }));
    throw std::runtime_error("no output");
  };
  EXPECT_EQ(Replay(real_file_system(), bundle, throwing).run({"gain=1"}).result, ReplayResult::kReproduced)
      << "the first failure counts";
}

TEST(Replay, AStateOfAnotherModelIsRefused) {
  const TempDir dir;
  const std::string bundle = record_tiny(dir, at_input());
  TinyTrainer trainer;
  ReplayTrainer other = trainer.replayed();
  std::vector<float> larger(5);
  const auto with = [&](const StateTensor& tensor) {
    other.state = [tensor] {
      TrainingState state;
      state.add(tensor);
      return state;
    };
  };
  with(StateTensor{.name = "weights", .data = larger.data(), .shape = {5}});
  expect_missing(bundle, other, "weights is of another model");
  with(StateTensor{.name = "weights", .data = larger.data(), .dtype = DType::kInt32, .shape = {4}});
  expect_missing(bundle, other, "weights is of another model");
  with(StateTensor{.name = "weights", .data = larger.data(), .shape = {2, 2}});
  expect_missing(bundle, other, "weights is of another model");
  with(StateTensor{.name = "weights", .data = larger.data(), .shape = {4, 1}});
  expect_missing(bundle, other, "weights is of another model");
  with(StateTensor{.name = "bias", .data = larger.data(), .shape = {4}});
  expect_missing(bundle, other, "the state before the attempt (bias)");
  with(StateTensor{.name = "weights", .data = larger.data(), .shape = {4}, .held = Held::kPerRank});
  expect_missing(bundle, other, "weights as rank 1 had it: a bundle holds what rank 0 has");
}

TEST(Replay, AStateOfComplexNumbersAndOfAScalarFitsWhatWasRecorded) {
  for (const std::uint64_t checkpoint_interval : {0u, 1000u}) {
    const TempDir dir;
    TinyRun run = at_input();
    run.checkpoint_interval = checkpoint_interval;
    run.clean_attempts = 0;
    if (checkpoint_interval > 0) run.policy = "evidence { bundle_quota_bytes: 320 }";
    run.change = [](TinyTrainer& t) {
      t.has_odd_shapes = true;
      t.phases[1][0] = {3.0, 4.0};
      t.scalar = 5;
    };
    TinyTrainer trainer;
    trainer.has_odd_shapes = true;
    const std::string bundle = record_tiny(dir, run);
    EXPECT_EQ(replay(bundle, trainer).result, ReplayResult::kReproduced);
    EXPECT_EQ(trainer.phases[1][0], (std::complex<double>{3.0, 4.0}));
    EXPECT_EQ(trainer.scalar, 5.0f);
    ReplayTrainer flat = trainer.replayed();
    flat.state = [&] {
      TrainingState state;
      state.add(
          StateTensor{.name = "phases", .data = trainer.phases, .dtype = DType::kComplex128, .shape = {4}});
      return state;
    };
    EXPECT_EQ(Replay(real_file_system(), bundle, flat).run().missing, "phases is of another model");
  }
}

TEST(Replay, AllRecordedStateIsGivenToATrainerThatLoadsItByName) {
  const TempDir dir;
  const std::string bundle = record_tiny(dir, at_input());
  TinyTrainer trainer;
  ReplayTrainer loading = trainer.replayed();
  std::vector<std::string> names;
  loading.state = {};
  loading.weights_digest = [] { return std::string(); };
  loading.load_state = [&](const RecordedTensor& tensor) {
    names.push_back(tensor.name);
    if (tensor.name == "weights")
      std::memcpy(trainer.weights.data(), tensor.bytes.data(), tensor.bytes.size());
    return Status();
  };
  loading.needed_state = {"weights"};
  EXPECT_EQ(Replay(real_file_system(), bundle, loading).run().result, ReplayResult::kReproduced);
  EXPECT_EQ(names, (std::vector<std::string>{"holdfast/spike_detectors", "mean", "steps", "table", "weights",
                                             "weights/square"}));
  loading.needed_state = {"weights", "bias"};
  std::filesystem::remove(bundle + "/experiments.jsonl");
  expect_missing(bundle, loading, "the state before the attempt (bias)");
}

// ---- what fails once

// Throws when a file is opened, the `nth` time.
class ThrowingOnce final : public ForwardingFileSystem {
 public:
  explicit ThrowingOnce(int nth) : left_(nth) {}
  Status open_file(const std::string& path, std::unique_ptr<ReadableFile>* out) override {
    if (--left_ == 0) throw std::runtime_error("no memory for " + path);
    return ForwardingFileSystem::open_file(path, out);
  }
  bool has_thrown() const { return left_ <= 0; }

 private:
  int left_;
};

TEST(Replay, AfterAnExceptionTheNextCallBeginsAnew) {
  const TempDir dir;
  const std::string bundle = record_tiny(dir, at_input());
  int nth = 1;
  for (;; ++nth) {
    ASSERT_LT(nth, 200);
    std::filesystem::remove(bundle + "/experiments.jsonl");
    ThrowingOnce files(nth);
    TinyTrainer trainer;
    Replay again(files, bundle, trainer.replayed());
    const ReplayReport first = again.run();
    if (!files.has_thrown()) break;
    EXPECT_EQ(first.result, ReplayResult::kNotReplayable) << first.text;
    EXPECT_EQ(trainer.attempts, 0);
    const ReplayReport second = again.run();
    EXPECT_EQ(second.result, ReplayResult::kReproduced) << nth << ": " << second.text;
    EXPECT_EQ(second.bits, Bits::kSame);
  }
  EXPECT_GT(nth, 8) << "manifest, texts, two parts and each tensor of the state";
}

// ---- what each rank has of its own

TinyRun with_own_state(int bad_rank) {
  TinyRun run = at_input();
  run.clean_attempts = 0;
  run.divide = [](TinyTrainer& t, int rank) {
    t.has_own_state = true;
    t.noise = {static_cast<float>(rank), 7.0f};
    t.cursor = std::to_string(rank);
  };
  run.spoil = [=](TinyTrainer& t, int rank) {
    if (rank == bad_rank) t.batch.at(2, 1) = kNanF;
  };
  return run;
}

// Takes the state by name, and keeps what is each rank's own.
ReplayTrainer loading_own(TinyTrainer& trainer, std::map<std::string, Bytes>* own) {
  ReplayTrainer loading = trainer.replayed();
  loading.state = {};
  loading.weights_digest = [] { return std::string(); };
  loading.load_state = [own](const RecordedTensor& tensor) {
    if (tensor.name == "noise" || tensor.name == "cursor") own->emplace(tensor.name, tensor.bytes);
    return Status();
  };
  return loading;
}

TEST(ReplayOfOwnState, WhatRankZeroHasOfItsOwnIsNotGivenAsAnothers) {
  const TempDir dir;
  const std::string bundle = record_tiny(dir, with_own_state(1));
  TinyTrainer trainer;
  std::map<std::string, Bytes> own;
  ReplayTrainer loading = loading_own(trainer, &own);
  EXPECT_EQ(Replay(real_file_system(), bundle, loading).run().result, ReplayResult::kReproduced);
  EXPECT_TRUE(own.empty());
  loading.needed_state = {"weights", "noise"};
  std::filesystem::remove(bundle + "/experiments.jsonl");
  expect_missing(bundle, loading,
                 "noise as rank 1 had it: a bundle holds what rank 0 has; the bundle names no checkpoint");
  trainer.has_own_state = true;
  expect_missing(bundle, trainer.replayed(), "noise as rank 1 had it: a bundle holds what rank 0 has");
}

TEST(ReplayOfOwnState, OfRankZeroItIsInTheBundle) {
  const TempDir dir;
  TinyTrainer trainer;
  std::map<std::string, Bytes> own;
  ReplayTrainer loading = loading_own(trainer, &own);
  loading.needed_state = {"noise"};
  const std::string bundle = record_tiny(dir, with_own_state(0));
  EXPECT_EQ(Replay(real_file_system(), bundle, loading).run().result, ReplayResult::kReproduced);
  ASSERT_EQ(own.size(), 2u);
  EXPECT_EQ(own.at("cursor"), "0");
}

TEST(ReplayOfOwnState, OfAnotherRankTheCheckpointHasIt) {
  const TempDir dir;
  TinyRun run = with_own_state(1);
  run.checkpoint_interval = 1000;
  TinyTrainer trainer;
  std::map<std::string, Bytes> own;
  ReplayTrainer loading = loading_own(trainer, &own);
  loading.needed_state = {"noise"};
  const std::string bundle = record_tiny(dir, run);
  EXPECT_EQ(Replay(real_file_system(), bundle, loading).run().result, ReplayResult::kReproduced);
  ASSERT_EQ(own.size(), 2u);
  EXPECT_EQ(own.at("cursor"), "1");
  trainer.has_own_state = true;
  const ReplayReport report = replay(bundle, trainer);
  EXPECT_EQ(report.result, ReplayResult::kReproduced) << report.text;
  EXPECT_EQ(trainer.noise, (std::vector<float>{1.0f, 7.0f}));
}

// ---- replica groups

// Rank 0's weights would leave the batch of rank 1 finite in forward.
TinyRun of_two_groups() {
  TinyRun run = at_forward();
  run.groups = 2;
  run.clean_attempts = 0;
  run.divide = [](TinyTrainer& t, int rank) { t.weights[2] = rank == 0 ? 0.5f : 2.0f; };
  return run;
}

TEST(ReplayOfGroups, AnotherGroupsWeightsAreNotTaken) {
  const TempDir dir;
  TinyTrainer trainer;
  expect_missing(record_tiny(dir, of_two_groups()), trainer.replayed(),
                 "the state before the attempt of replica group 1: the bundle has that of 0, rank 0's; the "
                 "bundle names no checkpoint");
  EXPECT_EQ(trainer.attempts, 0);
}

TEST(ReplayOfGroups, TheGroupsWeightsAreThoseOfTheCheckpoint) {
  const TempDir dir;
  TinyRun run = of_two_groups();
  run.checkpoint_interval = 1000;
  TinyTrainer trainer;
  const std::string bundle = record_tiny(dir, run);
  const ReplayReport report = replay(bundle, trainer);
  EXPECT_EQ(report.result, ReplayResult::kReproduced) << report.text;
  EXPECT_EQ(report.bits, Bits::kSame) << report.text;
  EXPECT_EQ(trainer.weights[2], 2.0f);
  EXPECT_NE(report.text.find("\nstate     of checkpoint e0001-a0000000000\n"), std::string::npos)
      << report.text;

  // The same of a trainer that takes the state by name, and needs none of it.
  ReplayTrainer loading = trainer.replayed();
  loading.state = {};
  loading.weights_digest = [] { return std::string(); };
  loading.load_state = [&](const RecordedTensor& tensor) {
    if (tensor.name == "weights")
      std::memcpy(trainer.weights.data(), tensor.bytes.data(), tensor.bytes.size());
    return Status();
  };
  trainer.weights[2] = 0;
  EXPECT_EQ(Replay(real_file_system(), bundle, loading).run().result, ReplayResult::kReproduced);
  EXPECT_EQ(trainer.weights[2], 2.0f);
}

// Of four ranks in two groups. What rank 1 finds is made again of its own group, whoever else was bad.
TEST(ReplayOfGroups, ASumIsOfTheGroupsRanksOnly) {
  for (const bool both : {false, true}) {
    const TempDir dir;
    TinyRun run = at_reduction();
    run.ranks = 4;
    run.groups = 2;
    run.clean_attempts = 0;
    run.checkpoint_interval = 1000;
    run.spoil = [=](TinyTrainer& t, int rank) {
      if (both || rank % 2 == 1) t.batch.gain = 1e37f;
    };
    TinyTrainer trainer;
    ReplayTrainer summing = trainer.replayed();
    std::vector<int> ranks;
    summing.reduce_again = [&, sum = summing.reduce_again](const RecordedAttempt& attempt,
                                                           ReplayWatcher& watcher) {
      EXPECT_EQ(attempt.ranks, 4u);
      EXPECT_EQ(attempt.replicas, 2u);
      for (const auto& [rank, facts] : attempt.facts) ranks.push_back(rank);
      sum(attempt, watcher);
    };
    const ReplayReport report = Replay(real_file_system(), record_tiny(dir, run), summing).run();
    EXPECT_EQ(report.result, ReplayResult::kReproduced) << report.text;
    EXPECT_EQ(ranks, both ? (std::vector<int>{0, 2}) : (std::vector<int>{1, 3})) << report.text;
  }
}

TEST(ReplayOfGroups, OfRankZerosGroupTheBundleHasTheWeights) {
  const TempDir dir;
  TinyRun run = of_two_groups();
  run.ranks = 3;
  run.spoil = [](TinyTrainer& t, int rank) {
    if (rank == 2) t.batch.at(5, 2) = -3e38f;
  };
  run.divide = [](TinyTrainer& t, int rank) { t.weights[2] = rank % 2 == 0 ? 2.0f : 0.5f; };
  TinyTrainer trainer;
  const ReplayReport report = replay(record_tiny(dir, run), trainer);
  EXPECT_EQ(report.result, ReplayResult::kReproduced) << report.text;
  EXPECT_EQ(report.bits, Bits::kSame) << report.text;
}

TEST(Replay, AnAttemptThatChangesWeightsIsCaught) {
  const TempDir dir;
  const std::string bundle = record_tiny(dir, at_input());
  TinyTrainer trainer;
  ReplayTrainer updating = trainer.replayed();
  updating.run_attempt = [&, run = updating.run_attempt](const RecordedAttempt& attempt,
                                                         ReplayWatcher& watcher) {
    run(attempt, watcher);
    trainer.square[3] += 1;
  };
  expect_missing(bundle, updating, "an attempt that leaves the weights as they are");
  const ReplayReport report = Replay(real_file_system(), bundle, updating).run();
  EXPECT_NE(report.text.find("\nweights   CHANGED\n"), std::string::npos) << report.text;
  EXPECT_EQ(replay(bundle, trainer).result, ReplayResult::kReproduced);
}

TEST(Replay, NamesFromABundleAreEscaped) {
  const TempDir dir;
  TinyRun run = at_input();
  run.spoil = [](TinyTrainer& t, int rank) { only(rank, [&] { t.batch.throws = true; }); };
  TinyTrainer trainer;
  const ReplayReport report = replay(record_tiny(dir, run), trainer);
  EXPECT_NE(report.text.find("exception at forward: bad \\x1b record"), std::string::npos) << report.text;
  EXPECT_EQ(report.text.find('\x1b'), std::string::npos);
}

// ---- the log of experiments

TEST(ReplayLog, EachExperimentIsKeptOnce) {
  const TempDir dir;
  const std::string bundle = record_tiny(dir, at_input());
  TinyTrainer trainer;
  for (int i = 0; i < 2; ++i) {
    replay(bundle, trainer);
    replay(bundle, trainer, {"sample.0.2=0"});
    replay(bundle, trainer, {"gain=2"});
  }
  const std::vector<Json> lines = parse_events(read_file(bundle + "/experiments.jsonl"));
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_EQ(lines[0].at("set"), Json::array());
  EXPECT_EQ(lines[0].at("result"), "REPRODUCED");
  EXPECT_EQ(lines[0].at("found"), "input x[9]: 1 NaN, 0 +Inf, 0 -Inf");
  EXPECT_EQ(lines[0].at("state"), "bundle");
  EXPECT_EQ(lines[1].at("set"), Json::array({"sample.0.2=0"}));
  EXPECT_EQ(lines[1].at("result"), "NOT_REPRODUCED");
  EXPECT_EQ(lines[0].at("input"), lines[1].at("input"));
  EXPECT_NE(lines[0].at("batch"), lines[1].at("batch"));
}

TEST(ReplayLog, WhatIsNoFileIsLeftAlone) {
  const TempDir dir;
  const std::string bundle = record_tiny(dir, at_input());
  write_file(dir / "victim", "mine\nhalf a line of mine");
  std::filesystem::create_symlink(dir / "victim", bundle + "/experiments.jsonl");
  TinyTrainer trainer;
  Replay again(real_file_system(), bundle, trainer.replayed());
  const ReplayReport report = again.run();
  EXPECT_EQ(read_file(dir / "victim"), "mine\nhalf a line of mine");
  EXPECT_TRUE(report.result == ReplayResult::kNotReplayable ||
              report.text.find("\nlog       not kept: ") != std::string::npos)
      << report.text;
}

TEST(ReplayLog, AFullLogIsSaidToBeOnceAndIsStillRead) {
  const TempDir dir;
  const std::string bundle = record_tiny(dir, at_input());
  const std::string log = bundle + "/experiments.jsonl";
  const std::string line(1 << 20, 'x');
  std::string text;
  for (int i = 0; i < 32; ++i) text += line.substr(i == 0 ? 33 : 1) + "\n";  // 32 bytes less than 32 MiB
  write_file(log, text);
  TinyTrainer trainer;
  const ReplayReport last = replay(bundle, trainer);
  EXPECT_EQ(last.text.find("\nlog "), std::string::npos) << last.text;
  EXPECT_EQ(read_file(log).find("{\"event\":\"replayed\""), text.size());
  std::uint64_t bytes = 0;
  for (int i = 0; i < 2; ++i) {
    const ReplayReport full = replay(bundle, trainer, {"sample.0.1=0"});
    EXPECT_EQ(full.result, ReplayResult::kReproduced);
    EXPECT_NE(full.text.find("\nlog       not kept: " + log + " has its 33554432 bytes: move it away\n"),
              std::string::npos)
        << full.text;
    if (i == 0) bytes = std::filesystem::file_size(log);
  }
  EXPECT_EQ(std::filesystem::file_size(log), bytes);
  const std::string end = read_file(log).substr(text.size());
  const std::vector<Json> events = parse_events(end);
  ASSERT_EQ(events.size(), 2u) << end;
  EXPECT_EQ(events[1].at("event"), "log_full");
  EXPECT_EQ(events[1].at("most_bytes"), 33554432);
  EXPECT_EQ(replay(bundle, trainer).text, last.text) << "what is there already is kept";
}

TEST(ReplayLog, LinesOfOthersAreKeptAndAreNotParsed) {
  const TempDir dir;
  const std::string bundle = record_tiny(dir, at_input());
  const std::string deep(100000, '[');
  write_file(bundle + "/experiments.jsonl", deep + "\nhalf a li");
  TinyTrainer trainer;
  EXPECT_EQ(replay(bundle, trainer).result, ReplayResult::kReproduced);
  const std::string text = read_file(bundle + "/experiments.jsonl");
  EXPECT_TRUE(text.starts_with(deep + "\n{\"event\":\"replayed\"")) << text.substr(deep.size());
}

}  // namespace
}  // namespace holdfast
