#include "holdfast/coord/run_overview.h"

#include <gtest/gtest.h>
#include <cinttypes>
#include <cstdio>

#include "coord/events.h"
#include "coord/sample_incident.h"
#include "holdfast/coord/coordinator.h"
#include "holdfast/coord/departure_log.h"
#include "holdfast/coord/policy.h"
#include "holdfast/coord/policy.pb.h"
#include "holdfast/coord/state.pb.h"

namespace holdfast {
namespace {

std::unique_ptr<Coordinator> start(const std::string& run_dir, const std::string& text = "") {
  Policy policy;
  EXPECT_TRUE(parse_policy(text, &policy).ok());
  std::unique_ptr<Coordinator> rank0;
  EXPECT_TRUE(Coordinator::resume(policy, run_dir, &rank0).ok());
  rank0->run_started(rank0->memory().epoch(), Topology({basic_placement(0)}));
  return rank0;
}

Json overview(const std::string& run_dir) {
  Json json;
  const Status status = run_overview(run_dir, &json);
  EXPECT_TRUE(status.ok()) << status.to_string();
  return json;
}

TEST(RunOverview, OfALiveRun) {
  const TempDir temp;
  const auto rank0 = start(temp / "run", "max_total_skips: 5 owner: 'ana' ticket: 'T-1'");
  rank0->update_applied(1, 0, 0);
  rank0->handle(one_nan(2));
  const Json run = overview(temp / "run");
  EXPECT_EQ(run["state"], "running");
  EXPECT_TRUE(run["holder"].get<std::string>().starts_with("host="));
  EXPECT_EQ(run["exit_code"], nullptr);
  EXPECT_EQ(run["epoch"], 1);
  EXPECT_EQ(run["budgets"]["total"], (Json{{"left", 4}, {"limit", 5}}));
  EXPECT_EQ(run["budgets"]["consecutive"], (Json{{"left", 9}, {"limit", 10}}));
  EXPECT_EQ(run["last_incident"]["event"], "attempt_skipped");
  EXPECT_EQ(run["last_incident"]["attempt"], 7);
  EXPECT_EQ(run["owner"], "ana");
  EXPECT_EQ(run["ticket"], "T-1");
  EXPECT_TRUE(run["as_of"].is_string());
  EXPECT_EQ(run["replica_proofs"], 0);
  EXPECT_EQ(run["ranks"][0]["rank"], 0);
  EXPECT_TRUE(run["topology"].get<std::string>().starts_with("1 rank on 1 host"));
  EXPECT_EQ(run["problems"], Json::array());
}

TEST(RunOverview, OfRunsThatHaveEnded) {
  const TempDir temp;
  start(temp / "done")->run_finished(1, 3, 3);
  Json run = overview(temp / "done");
  EXPECT_EQ(run["state"], "finished");
  EXPECT_EQ(run["exit_code"], 0);
  EXPECT_EQ(run["attempt"], 3);
  EXPECT_EQ(run["holder"], nullptr);

  start(temp / "aborted", "on_first: ABORT")->handle(one_nan(1));
  run = overview(temp / "aborted");
  EXPECT_EQ(run["state"], "aborted");
  EXPECT_EQ(run["exit_code"], 81);
  EXPECT_EQ(run["hold"]["exit_code"], 81);
  EXPECT_EQ(run["last_incident"]["event"], "aborted");

  start(temp / "stopped")->handle(sample_incident(4, [](Record& sum) { sum.set_request(Request::kStop); }));
  EXPECT_EQ(overview(temp / "stopped")["state"], "stopped");
}

// Of rank 0's process, as a live run's holder names it.
RankIdentity rank_0_of(const std::string& holder) {
  RankIdentity who;
  char host[256] = "";
  EXPECT_EQ(std::sscanf(holder.c_str(), "host=%255s pid=%" SCNd64, host, &who.pid), 2) << holder;
  who.host = host;
  return who;
}

Departure of_rank_0(const RankIdentity& who, std::uint64_t epoch) {
  Departure departure;
  departure.reported_by = 1;
  departure.missing.push_back({who, Absence::kDied, Place{epoch, 4, 1, Phase::kObserve}});
  return departure;
}

Departure of_rank_3_alone(std::uint64_t epoch) {
  Departure departure;
  departure.reported_by = 3;
  departure.alone = true;
  departure.survivors.push_back({{3, "b", 9}, Place{epoch, 4, 1, Phase::kObserve}});
  return departure;
}

// A run that was started twice and killed twice, the second time in epoch 2.
struct GoneRun {
  explicit GoneRun(const std::string& dir) : run_dir(dir) {
    { const auto first = start(run_dir); }
    const auto second = start(run_dir);
    EXPECT_EQ(second->memory().epoch(), 2u);
    rank_0 = rank_0_of(second->memory().holder());
  }
  void depart(const Departure& departure) const { EXPECT_TRUE(append_departure(run_dir, departure).ok()); }
  Json shown() const { return overview(run_dir)["departure"]; }

  const std::string run_dir;
  RankIdentity rank_0;
};

TEST(RunOverview, OfARunThatIsGone) {
  const TempDir temp;
  const GoneRun run(temp / "run");
  run.depart(of_rank_0(run.rank_0, 2));
  const Json shown = overview(run.run_dir);
  EXPECT_EQ(shown["state"], "gone");
  EXPECT_EQ(shown["departure"]["missing"][0]["absence"], "died");
  EXPECT_EQ(shown["ranks"].size(), 1u);
}

TEST(RunOverview, ADepartureOfARunThatHadTheFolderBeforeIsNotThisOnes) {
  const TempDir temp;
  const GoneRun run(temp / "run");
  const RankIdentity stranger = {0, run.rank_0.host, run.rank_0.pid + 1};
  const RankIdentity elsewhere = {0, "x" + run.rank_0.host, run.rank_0.pid};
  // All of them are written after this run's start.
  run.depart(of_rank_0(run.rank_0, 1));  // by a process that has the number again
  run.depart(of_rank_3_alone(1));
  run.depart(of_rank_3_alone(0));
  run.depart(of_rank_0(stranger, 0));
  // It went back to a checkpoint when it could not write any more that it did.
  run.depart(of_rank_0(stranger, 2));
  run.depart(of_rank_0(elsewhere, 2));
  EXPECT_EQ(run.shown(), nullptr);
  Departure survivor = of_rank_3_alone(2);
  survivor.survivors.insert(survivor.survivors.begin(), {stranger, Place{2, 4, 1, Phase::kObserve}});
  run.depart(survivor);
  EXPECT_EQ(run.shown(), nullptr);
}

TEST(RunOverview, ADepartureOfThisRunIsFoundBeforeThatOfAnother) {
  const TempDir temp;
  const GoneRun run(temp / "run");
  run.depart(of_rank_3_alone(3));  // after it went back
  run.depart(of_rank_3_alone(1));
  EXPECT_EQ(run.shown()["epoch"], 3);
  run.depart(of_rank_0(run.rank_0, 0));  // before its first attempt
  run.depart(of_rank_0({0, run.rank_0.host, run.rank_0.pid + 1}, 0));
  EXPECT_EQ(run.shown()["reported_by"], 1);
  write_file(run.run_dir + "/departures.jsonl",
             "{\"missing\": [7, {\"rank\": 0}], \"survivors\": 3, \"epoch\": 2}\n");
  EXPECT_EQ(run.shown(), nullptr) << "rank 0 without a process";
}

TEST(RunOverview, WhatIsNotARunIsRefused) {
  const TempDir temp;
  Json json;
  EXPECT_EQ(run_overview(temp / "nothing", &json).code(), StatusCode::kUsage);
  EXPECT_EQ(run_overview(temp.path(), &json).code(), StatusCode::kUsage);
  write_file(temp / "events.jsonl", "\n\0garbage\n{\"event\":\"run_started\"");
  EXPECT_EQ(run_overview(temp.path(), &json).code(), StatusCode::kUsage);
  std::filesystem::create_directories(temp / "odd/events.jsonl");
  write_file(temp / "odd/state", "x");
  EXPECT_EQ(run_overview(temp / "odd", &json).code(), StatusCode::kUsage);
}

// Each file in turn cut off at each of many places, and each byte of many changed: never a crash, always an
// answer.
TEST(RunOverview, DamagedFilesAreNamedAndTheRestIsShown) {
  const TempDir temp;
  const std::string run_dir = temp / "run";
  {
    const auto rank0 = start(run_dir, "ticket: 'T-1'");
    rank0->handle(one_nan(2));
    rank0->heard({{{0, "a", 1}, Place{1, 5, 2, Phase::kDecide}, 0}});
  }
  for (const std::string name : {"/events.jsonl", "/state", "/status.json"}) {
    const std::string path = run_dir + name;
    const std::string whole = read_file(path);
    const std::size_t step = 1 + whole.size() / 97;
    for (std::size_t at = 0; at < whole.size(); at += step) {
      Json json;
      write_file(path, whole.substr(0, at));
      const Status cut = run_overview(run_dir, &json);
      EXPECT_TRUE(cut.ok() || cut.code() == StatusCode::kUsage);
      std::string changed = whole;
      changed[at] = static_cast<char>(changed[at] ^ 0x15);
      write_file(path, changed);
      EXPECT_TRUE(run_overview(run_dir, &json).ok());
    }
    write_file(path, "{\"holder\": [1], \"ranks\": [{\"rank\": -1, \"host\": {}}, 3], \"time\": 7}");
    if (name != "/events.jsonl") {
      EXPECT_EQ(overview(run_dir)["last_incident"]["attempt"], 7);
    }
    if (name == "/state") {
      EXPECT_NE(overview(run_dir)["problems"][0].get<std::string>().find("damaged"), std::string::npos);
      EXPECT_EQ(overview(run_dir)["update"], nullptr);
    }
    write_file(path, whole);
  }
}

}  // namespace
}  // namespace holdfast
