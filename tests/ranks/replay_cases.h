// Attempts that go wrong, one for each stage, and what their bundles are asked.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "ranks/tiny_trainer.h"

namespace holdfast {

inline void only(int rank, const std::function<void()>& body) {
  if (rank == kTinyBadRank) body();
}

// The fault of each stage, by nature.
inline TinyRun at_input() {
  return {.spoil = [](TinyTrainer& t, int rank) { only(rank, [&] { t.batch.at(2, 1) = kNanF; }); }};
}
inline TinyRun at_forward() {
  return {.spoil = [](TinyTrainer& t, int rank) { only(rank, [&] { t.batch.at(5, 2) = -3e38f; }); }};
}
inline TinyRun at_loss() {
  return {.spoil = [](TinyTrainer& t, int rank) { only(rank, [&] { t.batch.at(3, 2) = 1e30f; }); }};
}
inline TinyRun at_backward() {
  return {.spoil = [](TinyTrainer& t, int rank) { only(rank, [&] { t.batch.gain = 3e38f; }); }};
}
inline TinyRun at_reduction() {
  return {.spoil = [](TinyTrainer& t, int) { t.batch.gain = 1e37f; }};
}
inline TinyRun at_optimizer() {
  TinyRun run;
  run.change = [](TinyTrainer& t) { t.eps = t.square[3] = 0; };
  run.spoil = [](TinyTrainer& t, int) {
    for (int s = 0; s < kTinySamples; ++s) t.batch.at(s, 3) = 0;
  };
  run.clean_attempts = 0;
  return run;
}
inline TinyRun that_throws() {
  return {.spoil = [](TinyTrainer& t, int rank) { only(rank, [&] { t.batch.throws = true; }); }};
}

inline ReplayReport replay(const std::string& bundle, TinyTrainer& trainer,
                           const std::vector<std::string>& settings = {}) {
  return Replay(real_file_system(), bundle, trainer.replayed()).run(settings);
}

// Not replayable for want of this, which is said.
inline void expect_missing(const std::string& bundle, const ReplayTrainer& trainer, const std::string& what,
                           const std::vector<std::string>& settings = {}) {
  const ReplayReport report = Replay(real_file_system(), bundle, trainer).run(settings);
  EXPECT_EQ(report.result, ReplayResult::kNotReplayable) << report.text;
  EXPECT_EQ(report.exit_code(), 3);
  EXPECT_NE(report.missing.find(what), std::string::npos) << report.text;
  EXPECT_EQ(report.text.find("\nmissing   ") != std::string::npos, true) << report.text;
  EXPECT_FALSE(std::filesystem::exists(bundle + "/experiments.jsonl"));
}

}  // namespace holdfast
