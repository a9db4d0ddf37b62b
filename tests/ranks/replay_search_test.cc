// The fewest samples that still do it, and one factor at a time.
#include <gtest/gtest.h>

#include "coord/events.h"
#include "ranks/tiny_trainer.h"

namespace holdfast {
namespace {

TinyRun spoiled(const std::function<void(TinyBatch&)>& spoil) {
  return {.spoil = [=](TinyTrainer& t, int rank) {
    if (rank == kTinyBadRank) spoil(t.batch);
  }};
}

TinyRun one_culprit() {
  return spoiled([](TinyBatch& batch) { batch.at(5, 1) = kNanF; });
}
// All is finite with either of them alone; the sum of their losses is not.
TinyRun two_culprits() {
  return spoiled([](TinyBatch& batch) { batch.at(1, 2) = batch.at(6, 2) = 8e18f; });
}
TinyRun no_culprit() {
  TinyRun run = spoiled([](TinyBatch&) {});
  run.spoil = [](TinyTrainer& t, int rank) {
    if (rank == kTinyBadRank) t.batch.throws = true;
  };
  return run;
}

struct Recorded {
  explicit Recorded(const TinyRun& run) : bundle(record_tiny(dir, run)) {}

  Replay replay() { return Replay(real_file_system(), bundle, trainer.replayed()); }
  std::vector<Json> log() const { return parse_events(read_file(bundle + "/experiments.jsonl")); }

  const TempDir dir;
  const std::string bundle;
  TinyTrainer trainer;
};

std::string line_of(const std::string& text, const std::string& what) {
  const auto at = text.find("\n" + what);
  return at == std::string::npos ? "" : text.substr(at + 1, text.find('\n', at + 1) - at - 1);
}

TEST(Shrink, FindsTheOneSampleThatDoesIt) {
  Recorded recorded(one_culprit());
  const ReplayReport report = recorded.replay().shrink();
  EXPECT_EQ(report.result, ReplayResult::kReproduced) << report.text;
  EXPECT_EQ(report.samples, (std::vector<RecordedSample>{{0, 5}}));
  EXPECT_TRUE(report.is_minimal);
  EXPECT_EQ(report.found->index, 21);
  EXPECT_TRUE(line_of(report.text, "shrunk")
                  .starts_with(
                      "shrunk    1 of 8 samples: 0.5 (id 105); without any one of them it does not happen, "))
      << report.text;
  EXPECT_EQ(line_of(report.text, "layers"), "layers    last clean layer none, first dirty x");
  EXPECT_EQ(line_of(report.text, "weights"), "weights   untouched");
}

TEST(Shrink, FindsTwoThatOnlyDoItTogether) {
  Recorded recorded(two_culprits());
  const ReplayReport report = recorded.replay().shrink();
  EXPECT_EQ(report.result, ReplayResult::kReproduced) << report.text;
  EXPECT_EQ(report.samples, (std::vector<RecordedSample>{{0, 1}, {0, 6}})) << report.text;
  EXPECT_TRUE(report.is_minimal);
  EXPECT_EQ(report.found->stage, Stage::kLoss);
  EXPECT_EQ(report.last_clean, "output");
  EXPECT_EQ(report.first_dirty, "loss");
}

TEST(Shrink, OfABatchThatIsRecordedWithoutMicroBatches) {
  TinyRun run = one_culprit();
  run.change = [](TinyTrainer& t) { t.without_micro_batches = true; };
  Recorded recorded(run);
  const ReplayReport report = recorded.replay().shrink();
  EXPECT_EQ(report.samples, (std::vector<RecordedSample>{{-1, 5}})) << report.text;
  EXPECT_TRUE(line_of(report.text, "shrunk").starts_with("shrunk    1 of 8 samples: 5 (id 105); "))
      << report.text;
  EXPECT_EQ(recorded.log().at(2).at("kept"), Json::array({"0-3"}));
  const ReplayReport tried = recorded.replay().one_factor();
  EXPECT_EQ(tried.factors.back(),
            (std::pair<std::string, ReplayResult>("sample.5=0", ReplayResult::kNotReproduced)));
  EXPECT_EQ(line_of(tried.text, "alone"), "alone     each takes it away: sample.5=0 (id 105)");
  EXPECT_EQ(recorded.replay().run({"sample.5=0"}).result, ReplayResult::kNotReproduced);
  EXPECT_EQ(recorded.replay().run({"sample.4=0"}).result, ReplayResult::kReproduced);
  EXPECT_EQ(recorded.replay().run({"sample.8=0"}).missing, "sample.8=0: the batch has no such sample");
  EXPECT_EQ(recorded.replay().run({"sample.0.5=0"}).missing, "sample.0.5=0: the batch has no such sample");
  for (const char* other : {"sample.-1.5=0", "sample.-5=0", "sample.=0", "sample.5.=0", "sample.0x5=0"})
    EXPECT_EQ(recorded.replay().run({other}).missing, std::string(other) + ": no setting of this trainer");
}

TEST(Shrink, SaysThatNoSampleIsNeeded) {
  Recorded recorded(no_culprit());
  const ReplayReport report = recorded.replay().shrink();
  EXPECT_EQ(report.result, ReplayResult::kReproduced) << report.text;
  EXPECT_EQ(report.samples, std::vector<RecordedSample>());
  EXPECT_TRUE(report.is_minimal);
  EXPECT_EQ(line_of(report.text, "shrunk"),
            "shrunk    0 of 8 samples: it happens with all of them blanked, 2 replays");
}

TEST(Shrink, WhatIsNotReproducedIsNotShrunk) {
  Recorded recorded(one_culprit());
  const ReplayReport report = recorded.replay().shrink({"sample.0.5=0"});
  EXPECT_EQ(report.result, ReplayResult::kNotReproduced) << report.text;
  EXPECT_EQ(line_of(report.text, "shrunk"), "");
  EXPECT_EQ(recorded.trainer.attempts, 1);
}

TEST(Shrink, SamplesThatAreBlankedAnywayAreNotCounted) {
  Recorded recorded(one_culprit());
  const ReplayReport report = recorded.replay().shrink({"sample.0.0=0", "sample.0.7=0"});
  EXPECT_EQ(report.samples, (std::vector<RecordedSample>{{0, 5}}));
  EXPECT_TRUE(line_of(report.text, "shrunk").starts_with("shrunk    1 of 6 samples")) << report.text;
}

TEST(Shrink, StopsAtItsLimitAndSaysSo) {
  Recorded recorded(two_culprits());
  const ReplayReport report = recorded.replay().shrink({}, 2);
  EXPECT_EQ(report.result, ReplayResult::kReproduced) << report.text;
  EXPECT_FALSE(report.is_minimal);
  EXPECT_EQ(report.samples.size(), 8u);
  EXPECT_NE(line_of(report.text, "shrunk").find("; perhaps not the fewest, 3 replays"), std::string::npos)
      << report.text;
  EXPECT_EQ(recorded.trainer.attempts, 4);  // the first, two of the search, the last
}

TEST(Shrink, BlankIsWhatTheTrainerMakesOfIt) {
  Recorded recorded(one_culprit());
  ReplayTrainer trainer = recorded.trainer.replayed();
  trainer.blank = [](RecordedTensor& tensor, std::int64_t row) {
    EXPECT_TRUE(tensor.name == "x" || tensor.name == "weight");
    EXPECT_LT(row, 8);
    throw std::runtime_error("cannot");
  };
  const ReplayReport report = Replay(real_file_system(), recorded.bundle, trainer).shrink();
  EXPECT_EQ(report.result, ReplayResult::kNotReplayable);
  EXPECT_EQ(report.missing, "blank failed: cannot");
}

TEST(Shrink, IsOnRecordAndAgainChangesNothing) {
  Recorded recorded(one_culprit());
  const ReplayReport first = recorded.replay().shrink();
  const std::string before = read_file(recorded.bundle + "/experiments.jsonl");
  const std::vector<Json> lines = recorded.log();
  ASSERT_GT(lines.size(), 3u);
  EXPECT_EQ(lines[0].at("event"), "replayed");
  EXPECT_FALSE(lines[0].contains("kept"));
  EXPECT_EQ(lines[1].at("kept"), Json::array());
  EXPECT_EQ(lines[1].at("result"), "NOT_REPRODUCED");
  EXPECT_EQ(lines[2].at("kept"), Json::array({"0.0-3"}));
  for (std::size_t i = 0; i + 1 < lines.size(); ++i)
    EXPECT_EQ(lines[i].at("batch").get<std::string>().size(), 64u);
  EXPECT_EQ(lines.back().at("event"), "shrunk");
  EXPECT_EQ(lines.back().at("samples"), Json::array({"0.5"}));
  EXPECT_EQ(lines.back().at("of"), 8);
  EXPECT_EQ(lines.back().at("minimal"), true);
  EXPECT_EQ(recorded.replay().shrink().text, first.text);
  EXPECT_EQ(read_file(recorded.bundle + "/experiments.jsonl"), before);
}

// Every second sample of 160 is blanked anyway, so that each of the others is a run of its own.
TEST(Shrink, OfASubsetOfManyRunsTheLogHasADigest) {
  TinyRun run = one_culprit();
  run.policy = "evidence { full_incidents: 0 }";
  run.checkpoint_interval = 1000;
  run.clean_attempts = 0;
  Recorded recorded(run);
  ReplayTrainer trainer = recorded.trainer.replayed();
  trainer.prepare = {};
  trainer.load_batch = [](RecordedAttempt* attempt) {
    attempt->batch = {{"bytes", DType::kUInt8, {160}, Bytes(160, '\1'), 0}};
    return Status();
  };
  trainer.run_attempt = [](const RecordedAttempt& attempt, ReplayWatcher& watcher) {
    std::vector<float> x(32, 1.0f);
    if (attempt.batch.at(0).bytes.at(0) != 0) x[21] = kNanF;
    watcher.observe(Stage::kInput, "x", TensorView::of(x));
  };
  std::vector<std::string> settings;
  for (int i = 1; i < 160; i += 2) settings.push_back("sample.0." + std::to_string(i) + "=0");
  const ReplayReport report = Replay(real_file_system(), recorded.bundle, trainer).shrink(settings, 1);
  EXPECT_EQ(report.samples.size(), 80u) << report.text;
  const std::vector<Json> lines = recorded.log();
  ASSERT_EQ(lines.size(), 4u);
  EXPECT_EQ(lines[1].at("kept"), Json::array());
  EXPECT_FALSE(lines[2].contains("kept"));
  EXPECT_EQ(lines[2].at("kept_samples"), 80);
  EXPECT_EQ(lines[2].at("kept_sha256").get<std::string>().size(), 64u);
  EXPECT_EQ(lines[3].at("samples").size(), 80u) << "what was found is told whole";
}

TEST(OneFactor, TriesEachAloneAndEachSampleOfTheSmallestSet) {
  Recorded recorded(two_culprits());
  const ReplayReport report = recorded.replay().one_factor();
  EXPECT_EQ(report.result, ReplayResult::kReproduced) << report.text;
  using Factors = std::vector<std::pair<std::string, ReplayResult>>;
  EXPECT_EQ(report.factors, (Factors{{"gain=1", ReplayResult::kReproduced},
                                     {"eps=0.5", ReplayResult::kReproduced},
                                     {"sample.0.1=0", ReplayResult::kNotReproduced},
                                     {"sample.0.6=0", ReplayResult::kNotReproduced}}))
      << report.text;
  EXPECT_TRUE(
      line_of(report.text, "shrunk").starts_with("shrunk    2 of 8 samples: 0.1 (id 101), 0.6 (id 106); "))
      << report.text;
  EXPECT_EQ(line_of(report.text, "alone"),
            "alone     each takes it away: sample.0.1=0 (id 101), sample.0.6=0 (id 106)");
  EXPECT_NE(report.text.find("\nfactor    sample.0.1=0 (id 101) "), std::string::npos) << report.text;
}

TEST(OneFactor, NamesWhatTakesItAway) {
  Recorded recorded(one_culprit());
  const ReplayReport report = recorded.replay().one_factor();
  EXPECT_EQ(report.factors.back(),
            (std::pair<std::string, ReplayResult>("sample.0.5=0", ReplayResult::kNotReproduced)));
  EXPECT_EQ(line_of(report.text, "alone"), "alone     each takes it away: sample.0.5=0 (id 105)");
  Recorded gain(spoiled([](TinyBatch& batch) { batch.gain = 3e38f; }));
  EXPECT_EQ(line_of(gain.replay().one_factor().text, "alone").substr(0, 38),
            "alone     each takes it away: gain=1");
}

TEST(OneFactor, AFactorThatTheTrainerRefusesIsOneThatCannotBeReplayed) {
  Recorded recorded(one_culprit());
  ReplayTrainer trainer = recorded.trainer.replayed();
  trainer.factors = [](const RecordedAttempt&) { return std::vector<std::string>{"depth=3"}; };
  const ReplayReport report = Replay(real_file_system(), recorded.bundle, trainer).one_factor();
  EXPECT_EQ(report.factors.at(0).second, ReplayResult::kNotReplayable);
  EXPECT_EQ(report.result, ReplayResult::kReproduced);
  EXPECT_NE(report.text.find("\nfactor    depth=3 "), std::string::npos);
  EXPECT_EQ(line_of(report.text, "alone"), "alone     each takes it away: sample.0.5=0 (id 105)");
}

TEST(OneFactor, MakesTwoAttemptsMoreThanTheLimitAndOneForEachFactorAndSample) {
  Recorded recorded(two_culprits());
  const ReplayReport report = recorded.replay().one_factor({}, 2);
  EXPECT_EQ(report.factors.size(), 10u) << report.text;
  EXPECT_EQ(recorded.trainer.attempts, 2 + 2 + 10);
}

TEST(OneFactor, SaysWhyThereIsNoSmallestSet) {
  Recorded recorded(one_culprit());
  ReplayTrainer trainer = recorded.trainer.replayed();
  trainer.blank = [](RecordedTensor&, std::int64_t) { throw std::runtime_error("cannot"); };
  const ReplayReport report = Replay(real_file_system(), recorded.bundle, trainer).one_factor();
  EXPECT_EQ(report.result, ReplayResult::kReproduced) << report.text;
  EXPECT_EQ(line_of(report.text, "shrunk"), "shrunk    nothing: blank failed: cannot");
  EXPECT_EQ(report.factors.size(), 2u) << "the trainer's are tried all the same";
}

TEST(OneFactor, SaysWhenNothingHelps) {
  Recorded recorded(no_culprit());
  const ReplayReport report = recorded.replay().one_factor();
  EXPECT_EQ(report.factors.size(), 2u) << report.text;
  EXPECT_EQ(line_of(report.text, "alone"), "alone     none of them takes it away");
}

TEST(OneFactor, IsOnRecordAndAgainChangesNothing) {
  Recorded recorded(one_culprit());
  recorded.replay().one_factor();
  const std::string before = read_file(recorded.bundle + "/experiments.jsonl");
  EXPECT_EQ(recorded.log().back().at("event"), "factors_tried");
  EXPECT_EQ(recorded.log().back().at("factors").size(), 3u);
  recorded.replay().one_factor();
  EXPECT_EQ(read_file(recorded.bundle + "/experiments.jsonl"), before);
}

}  // namespace
}  // namespace holdfast
