// Attempts that cannot be made again, and what they are said to lack.
#include <gtest/gtest.h>

#include <filesystem>

#include "ranks/checkpoint/forwarding_file_system.h"
#include "ranks/replay_cases.h"

namespace holdfast {
namespace {

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

}  // namespace
}  // namespace holdfast
