#include "holdfast/coord/run_monitor.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>

#include "coord/events.h"
#include "coord/sample_incident.h"
#include "holdfast/coord/coordinator.h"
#include "holdfast/coord/policy.h"
#include "holdfast/coord/policy.pb.h"
#include "holdfast/coord/run_folder.h"
#include "holdfast/coord/state.h"
#include "holdfast/coord/state.pb.h"
#include "holdfast/coord/stop_request.h"

namespace holdfast {
namespace {

Json status_of(const std::string& run_dir) {
  return Json::parse(read_file(run_dir + "/status.json"), nullptr, false, false);
}

template <typename Condition>
bool until(Condition&& condition) {
  for (int i = 0; i < 200 && !condition(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(50));
  return condition();
}

struct LiveRun {
  explicit LiveRun(const TempDir& temp) : run_dir(temp / "run") {
    Policy policy;
    EXPECT_TRUE(parse_policy("", &policy).ok());
    EXPECT_TRUE(Coordinator::resume(policy, run_dir, &rank0).ok());
    rank0->run_started(rank0->memory().epoch(), Topology({basic_placement(0), basic_placement(1)}));
  }
  const std::string run_dir;
  std::unique_ptr<Coordinator> rank0;
};

TEST(RunMonitor, TheFilesAreThereFromTheStartAndFollowTheRun) {
  const TempDir temp;
  LiveRun run(temp);
  Json status = status_of(run.run_dir);
  EXPECT_EQ(status["attempt"], 0);
  EXPECT_EQ(status["exit_code"], nullptr);
  EXPECT_EQ(status["attempts_per_second"], nullptr);
  ASSERT_EQ(status["ranks"].size(), 2u);
  EXPECT_EQ(status["ranks"][1]["rank"], 1);
  EXPECT_EQ(status["ranks"][1]["pid"], getpid());
  EXPECT_EQ(status["ranks"][1]["phase"], nullptr);
  for (const char* name : {"/status.json", "/metrics.prom"}) {
    struct stat info = {};
    ASSERT_EQ(stat((run.run_dir + name).c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 0777, 0600u);
  }

  run.rank0->metrics().count_replica_proof();
  run.rank0->metrics().count_replica_proof();
  for (std::uint64_t i = 0; i < 5; ++i) run.rank0->update_applied(1, i, i);
  run.rank0->heard({{{0, "a", 1}, Place{1, 5, 2, Phase::kDecide}, 0},
                    {{1, "b\n", 2}, Place{1, 4, 2, Phase::kObserve}, 2.5}});
  EXPECT_TRUE(until([&] { return status_of(run.run_dir)["attempt"] == 5; }));
  status = status_of(run.run_dir);
  EXPECT_GT(status["attempts_per_second"], 0);
  EXPECT_EQ(status["replica_proofs"], 2);
  EXPECT_EQ(status["ranks"][1]["attempt"], 4);
  EXPECT_EQ(status["ranks"][1]["phase"], "observe");
  EXPECT_GE(status["ranks"][1]["seconds_ago"], 2.5);  // and the time since rank 0 heard so
  EXPECT_NE(read_file(run.run_dir + "/metrics.prom").find("\nholdfast_updates_total 5\n"), std::string::npos);
  EXPECT_NE(read_file(run.run_dir + "/metrics.prom").find("\nholdfast_replica_proofs_total 2\n"),
            std::string::npos);
}

TEST(RunMonitor, TheEndIsWrittenBeforeAnyRankIsTold) {
  const TempDir temp;
  LiveRun run(temp);
  run.rank0->handle(sample_incident(4, [](Record& sum) { sum.set_request(Request::kStop); }));
  EXPECT_EQ(status_of(run.run_dir)["exit_code"], 86);
  EXPECT_NE(read_file(run.run_dir + "/metrics.prom").find("\nholdfast_running 0\n"), std::string::npos);
}

TEST(RunMonitor, ARequestToStopReachesTheRunItNamesAndNoOther) {
  const TempDir temp;
  LiveRun run(temp);
  ASSERT_TRUE(write_stop_request(run.run_dir, {"another run", "x"}).ok());
  EXPECT_TRUE(until([&] { return access(stop_request_path(run.run_dir).c_str(), F_OK) != 0; }));
  EXPECT_FALSE(run.rank0->stop_requested());
  const std::string holder = *RunFolder::live_holder(run.run_dir);
  ASSERT_TRUE(write_stop_request(run.run_dir, {holder, "ana\x1b[31m"}).ok());
  EXPECT_TRUE(until([&] { return run.rank0->stop_requested(); }));
  EXPECT_TRUE(run.rank0->stop_requested());
  const auto events = events_named(run.run_dir, "stop_requested");
  ASSERT_EQ(events.size(), 1u) << "told once";
  EXPECT_EQ(events[0]["by"], "ana\x1b[31m");
  EXPECT_NE(access(stop_request_path(run.run_dir).c_str(), F_OK), 0) << "a restart must not find it";
}

TEST(RunMonitor, ARequestThatAnEarlierRunLeftIsNotTaken) {
  const TempDir temp;
  std::string holder;
  {
    LiveRun run(temp);
    holder = *RunFolder::live_holder(run.run_dir);
  }
  ASSERT_TRUE(write_stop_request(temp / "run", {holder, "x"}).ok());
  LiveRun again(temp);
  EXPECT_NE(access(stop_request_path(again.run_dir).c_str(), F_OK), 0);
  EXPECT_FALSE(again.rank0->stop_requested());
}

TEST(RunMonitor, ARunThatWasTakenOverLeavesTheFilesAlone) {
  const TempDir temp;
  LiveRun run(temp);
  RunState later;
  later.set_epoch(2);
  later.set_holder("the other");
  ASSERT_TRUE(claim_state(run.run_dir, later).ok());
  write_file(run.run_dir + "/status.json", "theirs");
  write_file(run.run_dir + "/metrics.prom", "theirs");
  ASSERT_TRUE(write_stop_request(run.run_dir, {"the other", "x"}).ok());
  std::this_thread::sleep_for(std::chrono::milliseconds(1300));  // a round of the thread
  run.rank0.reset();
  EXPECT_EQ(read_file(run.run_dir + "/status.json"), "theirs");
  EXPECT_EQ(read_file(run.run_dir + "/metrics.prom"), "theirs");
  EXPECT_EQ(access(stop_request_path(run.run_dir).c_str(), F_OK), 0);
}

// Clean attempts alone write nothing for a thousand of them: it is the thread that looks.
TEST(RunMonitor, ARunThatWasTakenOverIsToldWithinARoundThoughItWritesNothing) {
  const TempDir temp;
  LiveRun run(temp);
  std::this_thread::sleep_for(std::chrono::milliseconds(1300));  // a round of the thread
  EXPECT_FALSE(run.rank0->taken_over());
  RunState later;
  later.set_epoch(2);
  later.set_holder("the other");
  ASSERT_TRUE(claim_state(run.run_dir, later).ok());
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_TRUE(until([&] { return run.rank0->taken_over(); }));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(3));

  // What was seen once stays so, whatever becomes of the file.
  write_file(state_path(run.run_dir), "damaged");
  testing::internal::CaptureStderr();
  const Decision decision =
      run.rank0->handle(sample_incident(4, [](Record& sum) { sum.set_request(Request::kStop); }));
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_EQ(decision.exit_code(), 83);
  EXPECT_NE(said.find("now belongs to the other, epoch 2"), std::string::npos) << said;
  EXPECT_EQ(read_file(state_path(run.run_dir)), "damaged");
  EXPECT_EQ(events_named(run.run_dir, "stopped").size(), 0u);
}

TEST(RunMonitor, WhatCannotBeWrittenIsSaidOnceAndChangesNothing) {
  const TempDir temp;
  LiveRun run(temp);
  std::filesystem::remove(run.run_dir + "/metrics.prom");
  std::filesystem::create_directory(run.run_dir + "/metrics.prom");
  testing::internal::CaptureStderr();
  std::this_thread::sleep_for(std::chrono::milliseconds(1300));  // a round of the thread
  run.rank0->run_finished(1, 7, 7);
  const std::string said = testing::internal::GetCapturedStderr();
  const std::size_t first = said.find("cannot write " + run.run_dir + "/metrics.prom");
  EXPECT_NE(first, std::string::npos) << said;
  EXPECT_EQ(said.find("cannot write", first + 1), std::string::npos) << said;
  EXPECT_EQ(status_of(run.run_dir)["exit_code"], 0);
  EXPECT_EQ(events_named(run.run_dir, "run_finished").size(), 1u);
}

// 4096 ranks are not written out each second.
TEST(RunMonitor, OfManyRanksThoseFurthestBehindAreShown) {
  const TempDir temp;
  LiveRun run(temp);
  std::vector<RankReport> reports;
  for (int rank = 0; rank < 1000; ++rank) {
    reports.push_back({{rank, "h", 1}, Place{1, rank == 999 ? 6u : 7u, 1, Phase::kObserve}, 0});
  }
  run.rank0->heard(std::move(reports));
  run.rank0->run_finished(1, 7, 7);
  const Json status = status_of(run.run_dir);
  EXPECT_EQ(status["ranks"].size(), 256u);
  EXPECT_EQ(status["ranks"][0]["rank"], 999);
  EXPECT_EQ(status["ranks_omitted"], 744);
}

TEST(RunFolder, ALookAtTheLockDoesNotKeepARunOut) {
  const TempDir temp;
  LiveRun run(temp);
  EXPECT_TRUE(RunFolder::live_holder(run.run_dir)->starts_with("host="));
  run.rank0.reset();
  EXPECT_EQ(RunFolder::live_holder(run.run_dir), std::nullopt);
  EXPECT_EQ(RunFolder::live_holder(temp / "nothing"), std::nullopt);
  std::atomic<bool> done = false;
  std::thread looker([&] {
    for (int i = 0; i < 1000 && !done; ++i) static_cast<void>(RunFolder::live_holder(run.run_dir));
  });
  for (int i = 0; i < 20; ++i) {
    RunFolder folder;
    EXPECT_TRUE(folder.open(run.run_dir).ok());
  }
  done = true;
  looker.join();
}

}  // namespace
}  // namespace holdfast
