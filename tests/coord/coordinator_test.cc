#include "holdfast/coord/coordinator.h"

#include <gtest/gtest.h>

#include <set>

#include "coord/events.h"
#include "coord/file_size_limit.h"
#include "coord/sample_incident.h"
#include "holdfast/coord/policy.h"
#include "holdfast/coord/policy.pb.h"

namespace holdfast {
namespace {

std::unique_ptr<Coordinator> coordinator(const std::string& run_dir, const std::string& policy_text = "") {
  Policy policy;
  EXPECT_TRUE(parse_policy(policy_text, &policy).ok());
  std::unique_ptr<Coordinator> made;
  const Status status = Coordinator::create(policy, run_dir, &made);
  EXPECT_TRUE(status.ok()) << status.to_string();
  return made;
}

std::set<std::string> keys(const Json& json) {
  std::set<std::string> names;
  for (const auto& [key, value] : json.items()) names.insert(key);
  return names;
}

TEST(Coordinator, ASkippedAttemptIsOnRecordWithTheContractsFields) {
  const TempDir temp;
  const auto rank0 = coordinator(temp / "run");
  EXPECT_EQ(rank0->handle(one_nan(2)).action, Action::kSkip);

  const std::vector<Json> events = read_events(temp / "run");
  ASSERT_EQ(events.size(), 1u);
  const Json& event = events[0];
  EXPECT_EQ(keys(event),
            (std::set<std::string>{"event", "time", "epoch", "attempt", "update", "stage", "nan", "pos_inf",
                                   "neg_inf", "loss", "consecutive", "total", "origins", "reason"}));
  EXPECT_EQ(event["event"], "attempt_skipped");
  EXPECT_EQ(event["epoch"], 1);
  EXPECT_EQ(event["attempt"], 7);
  EXPECT_EQ(event["update"], 5);
  EXPECT_EQ(event["stage"], "backward");
  EXPECT_EQ(event["nan"], 1);
  EXPECT_EQ(event["pos_inf"], 0);
  EXPECT_EQ(event["neg_inf"], 0);
  EXPECT_EQ(event["loss"], "nan");
  EXPECT_EQ(event["consecutive"], 1);
  EXPECT_EQ(event["total"], 1);
  ASSERT_EQ(event["origins"].size(), 1u);
  const Json& origin = event["origins"][0];
  EXPECT_EQ(keys(origin), (std::set<std::string>{"rank", "host", "stage", "tensor", "index", "nan", "pos_inf",
                                                 "neg_inf", "micro_batch", "facts"}));
  EXPECT_EQ(origin["rank"], 2);
  EXPECT_EQ(origin["host"], "node2");
  EXPECT_EQ(origin["stage"], "backward");
  EXPECT_EQ(origin["tensor"], "conv1.weight");
  EXPECT_EQ(origin["index"], 71);
  EXPECT_EQ(origin["nan"], 1);
  EXPECT_EQ(origin["pos_inf"], 0);
  EXPECT_EQ(origin["neg_inf"], 0);
  EXPECT_EQ(origin["micro_batch"], 2);
}

// Field case 4: counters have 64 bits down to the record.
TEST(Coordinator, CountsBeyond32BitsAreWrittenExactly) {
  const TempDir temp;
  const auto rank0 = coordinator(temp / "run");
  Record one_rank;
  one_rank.add_bad(Stage::kBackward, {2147483646, 0, 0});
  const Incident incident = sample_incident(4, [&](Record& sum) {
    for (int r = 0; r < 4; ++r) sum += one_rank;
  });
  EXPECT_TRUE(rank0->handle(incident).reason.starts_with("8589934584 non-finite values at backward"));
  EXPECT_EQ(read_events(temp / "run").at(0)["nan"].get<std::uint64_t>(), 8589934584u);
}

// Field case 32: nothing is skipped in silence.
TEST(Coordinator, TenBadAttemptsAreTenEventsWithTheLossAsItWas) {
  const TempDir temp;
  const auto rank0 = coordinator(temp / "run");
  for (std::uint64_t attempt = 0; attempt < 10; ++attempt) {
    Incident incident = one_nan(3);
    incident.attempt = attempt;
    incident.update = 0;
    EXPECT_EQ(rank0->handle(incident).action, Action::kSkip);
  }
  const std::vector<Json> events = events_named(temp / "run", "attempt_skipped");
  ASSERT_EQ(events.size(), 10u);
  for (std::size_t i = 0; i < events.size(); ++i) {
    EXPECT_EQ(events[i]["attempt"], i);
    EXPECT_EQ(events[i]["consecutive"], i + 1);
    EXPECT_EQ(events[i]["total"], i + 1);
    EXPECT_EQ(events[i]["update"], 0);
    EXPECT_EQ(events[i]["loss"], "nan");
  }
}

TEST(Coordinator, TheSkipThatBreaksTheBudgetIsAnAbortAndCountsNoFurther) {
  const TempDir temp;
  const auto rank0 = coordinator(temp / "run", "max_consecutive_skips: 2");
  EXPECT_EQ(rank0->handle(one_nan(0)).action, Action::kSkip);
  EXPECT_EQ(rank0->handle(one_nan(0)).action, Action::kSkip);
  EXPECT_EQ(rank0->handle(one_nan(0)).exit_code(), 81);
  const std::vector<Json> aborted = events_named(temp / "run", "aborted");
  ASSERT_EQ(aborted.size(), 1u);
  EXPECT_EQ(aborted[0]["exit_code"], 81);
  EXPECT_EQ(aborted[0]["code"], "BUDGET_EXHAUSTED");
  EXPECT_EQ(aborted[0]["stage"], "backward");
  EXPECT_EQ(aborted[0]["total"], 2);
  EXPECT_EQ(aborted[0]["origins"][0]["rank"], 0);
  EXPECT_EQ(events_named(temp / "run", "attempt_skipped").size(), 2u);
}

Topology four_ranks() {
  std::vector<RankPlacement> placements;
  for (int rank = 0; rank < 4; ++rank) placements.push_back(basic_placement(rank));
  return Topology(std::move(placements));
}

TEST(Coordinator, AnAppliedUpdateEndsARowOfSkips) {
  const TempDir temp;
  const auto rank0 = coordinator(temp / "run", "max_consecutive_skips: 1");
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(rank0->handle(one_nan(0)).action, Action::kSkip);
    rank0->update_applied(1, 0, 0);
  }
  EXPECT_EQ(read_events(temp / "run").back()["total"], 5);
  EXPECT_EQ(read_events(temp / "run").back()["consecutive"], 1);
}

TEST(Coordinator, AnErrorIsOnRecordWithItsRankAndWords) {
  const TempDir temp;
  const auto rank0 = coordinator(temp / "run");
  EXPECT_EQ(rank0->handle(exception_on(1, "cannot read\nshard \xff")).exit_code(), 80);
  const std::vector<Json> events = events_named(temp / "run", "aborted");
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0]["error"]["rank"], 1);
  EXPECT_EQ(events[0]["error"]["host"], "node1");
  EXPECT_EQ(events[0]["error"]["stage"], "forward");
  EXPECT_EQ(events[0]["error"]["what"], "cannot read\nshard \xef\xbf\xbd");
  EXPECT_EQ(events[0]["loss"], nullptr);
  EXPECT_TRUE(events[0]["origins"].empty());
}

TEST(Coordinator, AStopIsItsOwnEvent) {
  const TempDir temp;
  const auto rank0 = coordinator(temp / "run");
  const Incident incident = sample_incident(4, [](Record& sum) { sum.set_request(Request::kStop); });
  EXPECT_EQ(rank0->handle(incident).exit_code(), 86);
  const std::vector<Json> events = events_named(temp / "run", "stopped");
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0]["exit_code"], 86);
  EXPECT_EQ(events[0]["stage"], nullptr);
}

// A learning rate that blows up makes every rank bad.
TEST(Coordinator, OriginsAreCappedAndTheCapIsSaid) {
  for (const int bad : {64, 65, 1000}) {
    const TempDir temp;
    const auto rank0 = coordinator(temp / "run");
    Incident incident = sample_incident(1000, [&](Record& sum) {
      sum.add_bad(Stage::kBackward, {static_cast<std::uint64_t>(bad), 0, 0});
    });
    for (int r = 0; r < bad; ++r) {
      incident.views.push_back(sample_view(r, {{Stage::kBackward, "w", 0, {1, 0, 0}, 0}}));
    }
    rank0->handle(incident);
    const Json event = read_events(temp / "run").at(0);
    EXPECT_EQ(event["origins"].size(), 64u);
    EXPECT_EQ(event["origins"][63]["rank"], 63);
    EXPECT_EQ(event["nan"], bad);
    if (bad == 64) {
      EXPECT_FALSE(event.contains("origins_omitted"));
    } else {
      EXPECT_EQ(event["origins_omitted"], bad - 64);
    }
  }
}

TEST(Coordinator, TheLossIsThatOfTheFirstOrigin) {
  const TempDir temp;
  const auto rank0 = coordinator(temp / "run");
  Incident incident = one_nan(2);
  RankView other = sample_view(1, {});
  other.has_loss = true;
  other.loss = 0.5;
  incident.views[0].loss = std::numeric_limits<double>::infinity();
  incident.views.insert(incident.views.begin(), other);
  rank0->handle(incident);
  EXPECT_EQ(read_events(temp / "run").at(0)["loss"], "inf");
}

TEST(Coordinator, StartAndEndOfTheRunAreOnRecordWithThePolicyAndWhoOwnsIt) {
  const TempDir temp;
  const auto rank0 = coordinator(temp / "run", "owner: 'ana' ticket: 'T-9' max_total_skips: 3");
  rank0->run_started(1, four_ranks());
  rank0->handle(one_nan(2));
  rank0->run_finished(1, 10, 9);
  const std::vector<Json> events = read_events(temp / "run");
  ASSERT_EQ(events.size(), 3u);
  EXPECT_EQ(events[0]["event"], "run_started");
  EXPECT_EQ(events[0]["ranks"], 4);
  EXPECT_NE(events[0]["policy"].get<std::string>().find("max_total_skips: 3"), std::string::npos);
  EXPECT_EQ(events[2]["event"], "run_finished");
  EXPECT_EQ(events[2]["attempt"], 10);
  EXPECT_EQ(events[2]["update"], 9);
  EXPECT_EQ(events[2]["skips"], 1);
  for (const Json& event : events) {
    EXPECT_EQ(event["owner"], "ana");
    EXPECT_EQ(event["ticket"], "T-9");
  }
}

TEST(Coordinator, WithoutARunFolderItDecidesAllTheSame) {
  const auto rank0 = coordinator("", "max_total_skips: 1");
  rank0->run_started(1, four_ranks());
  EXPECT_EQ(rank0->handle(one_nan(2)).action, Action::kSkip);
  EXPECT_EQ(rank0->handle(one_nan(2)).exit_code(), 81);
}

TEST(Coordinator, ARunFolderInUseIsAUsageError) {
  const TempDir temp;
  const auto first = coordinator(temp / "run");
  Policy policy;
  ASSERT_TRUE(parse_policy("", &policy).ok());
  std::unique_ptr<Coordinator> second;
  EXPECT_EQ(Coordinator::create(policy, temp / "run", &second).code(), StatusCode::kUsage);
  EXPECT_EQ(second, nullptr);
}

// Evidence never decides: the record is lost, the decision is not.
TEST(Coordinator, ARecordThatCannotBeWrittenDoesNotChangeTheDecision) {
  const TempDir temp;
  const auto rank0 = coordinator(temp / "run");
  testing::internal::CaptureStderr();
  Decision decision;
  {
    const FileSizeLimit full(0);
    decision = rank0->handle(one_nan(2));
  }
  testing::internal::GetCapturedStderr();
  EXPECT_EQ(decision.action, Action::kSkip);
  EXPECT_EQ(rank0->handle(one_nan(2)).action, Action::kSkip);
  const std::vector<Json> events = read_events(temp / "run");
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0]["total"], 2);  // the lost one was counted
}

}  // namespace
}  // namespace holdfast
