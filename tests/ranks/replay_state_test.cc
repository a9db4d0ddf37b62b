// The state that an attempt is made again with: the model's, each rank's own, and that of its replica group.
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <map>

#include "ranks/replay_cases.h"

namespace holdfast {
namespace {

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

}  // namespace
}  // namespace holdfast
