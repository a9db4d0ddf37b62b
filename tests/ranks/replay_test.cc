// An attempt that was recorded by a real guard, made again by the library.
#include <gtest/gtest.h>

#include <cstdlib>

#include "ranks/replay_cases.h"

namespace holdfast {
namespace {

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

}  // namespace
}  // namespace holdfast
