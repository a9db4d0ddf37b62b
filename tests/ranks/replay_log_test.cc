// The log of experiments that is kept in a bundle.
#include <gtest/gtest.h>

#include <filesystem>

#include "coord/events.h"
#include "ranks/replay_cases.h"

namespace holdfast {
namespace {

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
