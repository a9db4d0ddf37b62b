#include "holdfast/coord/metrics.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <thread>

#include "coord/sample_incident.h"
#include "holdfast/coord/coordinator.h"
#include "holdfast/coord/policy.h"
#include "holdfast/coord/policy.pb.h"

namespace holdfast {
namespace {

// Samples by name and labels, as they stand in the text.
std::map<std::string, std::string> samples(const RunMetrics& metrics) {
  std::map<std::string, std::string> found;
  std::istringstream lines(metrics_text(metrics.collect()));
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("#")) continue;
    const std::size_t space = line.rfind(' ');
    EXPECT_TRUE(found.emplace(line.substr(0, space), line.substr(space + 1)).second) << "twice: " << line;
  }
  return found;
}

std::unique_ptr<Coordinator> rank0(const std::string& policy_text = "") {
  Policy policy;
  EXPECT_TRUE(parse_policy(policy_text, &policy).ok());
  std::unique_ptr<Coordinator> made;
  EXPECT_TRUE(Coordinator::create(policy, "", &made).ok());
  made->run_started(1, Topology({basic_placement(0)}));
  return made;
}

TEST(Metrics, AreDefinedBeforeTheFirstAttempt) {
  const auto run = rank0("max_total_skips: 7 max_consecutive_skips: 3");
  const auto found = samples(run->metrics());
  EXPECT_EQ(found.at("holdfast_running"), "1");
  EXPECT_EQ(found.at("holdfast_epoch"), "1");
  EXPECT_EQ(found.at("holdfast_attempts_total"), "0");
  EXPECT_EQ(found.at("holdfast_replica_proofs_total"), "0");
  EXPECT_EQ(found.at("holdfast_skip_ratio{rule=\"burst\"}"), "0");
  EXPECT_EQ(found.at("holdfast_skip_ratio{rule=\"creep\"}"), "0");
  EXPECT_EQ(found.at("holdfast_skips_total{stage=\"backward\",class=\"nan\"}"), "0");
  EXPECT_EQ(found.at("holdfast_skip_budget_left{budget=\"total\"}"), "7");
  EXPECT_EQ(found.at("holdfast_skip_budget_left{budget=\"consecutive\"}"), "3");
  EXPECT_EQ(found.count("holdfast_loss_scale"), 0u) << "nobody scales the loss";
  for (const auto& [name, value] : found) EXPECT_EQ(value.find("aN"), std::string::npos) << name;
}

TEST(Metrics, CountersReconcileAndEachSkipIsInOnePlace) {
  const auto run =
      rank0("max_consecutive_skips: 3 rate_rules { name: 'r' window_attempts: 10 max_skips: 2 }");
  run->update_applied(1, 0, 0);
  Incident mixed = one_nan(1);
  mixed.verdict.sum.add_bad(Stage::kBackward, {0, 2, 0});
  EXPECT_EQ(run->handle(one_nan(2)).action, Action::kSkip);
  EXPECT_EQ(run->handle(mixed).action, Action::kSkip);
  EXPECT_EQ(run->handle(one_nan(3)).action, Action::kSkip);
  auto found = samples(run->metrics());
  EXPECT_EQ(found.at("holdfast_attempts_total"), "4");
  EXPECT_EQ(found.at("holdfast_updates_total"), "1");
  EXPECT_EQ(found.at("holdfast_skips_total{stage=\"backward\",class=\"nan\"}"), "2");
  EXPECT_EQ(found.at("holdfast_skips_total{stage=\"backward\",class=\"mixed\"}"), "1");
  EXPECT_EQ(found.at("holdfast_incidents_total"), "3");
  EXPECT_EQ(found.at("holdfast_skip_ratio{rule=\"r\"}"), "0.75");
  EXPECT_EQ(found.at("holdfast_skip_budget_left{budget=\"total\"}"), "97");
  EXPECT_EQ(found.at("holdfast_skip_budget_left{budget=\"consecutive\"}"), "0");

  EXPECT_EQ(run->handle(one_nan(2)).exit_code(), 81);
  found = samples(run->metrics());
  EXPECT_EQ(found.at("holdfast_attempts_total"), "5");
  EXPECT_EQ(found.at("holdfast_incidents_total"), "4");
  EXPECT_EQ(found.at("holdfast_running"), "0");
}

TEST(Metrics, AnExceptionThatIsSkippedHasNoClass) {
  const auto run = rank0("on_error: SKIP");
  EXPECT_EQ(run->handle(exception_on(1, "no")).action, Action::kSkip);
  EXPECT_EQ(samples(run->metrics()).at("holdfast_skips_total{stage=\"forward\",class=\"none\"}"), "1");
}

TEST(Metrics, AlertsAreCountedAndShownWhileTheyAreRaised) {
  const auto run = rank0("rate_rules { name: 'r' window_attempts: 4 max_skips: 1 least_attempts: 1 }");
  for (int i = 0; i < 2; ++i) run->handle(one_nan(0));
  auto found = samples(run->metrics());
  EXPECT_EQ(found.at("holdfast_alerts_raised_total{rule=\"r\"}"), "1");
  EXPECT_EQ(found.at("holdfast_alert_active{rule=\"r\"}"), "1");
  for (std::uint64_t i = 0; i < 4; ++i) run->update_applied(1, 2 + i, i);
  found = samples(run->metrics());
  EXPECT_EQ(found.at("holdfast_alerts_raised_total{rule=\"r\"}"), "1");
  EXPECT_EQ(found.at("holdfast_alert_active{rule=\"r\"}"), "0");
}

TEST(Metrics, TheLossScaleComesWithItsFloor) {
  const auto run = rank0("loss_scale { smallest: 2 }");
  run->keep_loss_scale(4096, 0, 1);
  const auto found = samples(run->metrics());
  EXPECT_EQ(found.at("holdfast_loss_scale"), "4096");
  EXPECT_EQ(found.at("holdfast_loss_scale_floor"), "2");
}

TEST(Metrics, NamesOfAnyBytesMakeGoodText) {
  RunMetrics metrics({}, 1, 1);
  metrics.set_watched("a\"b\\c\nd\xff", std::nan(""));
  metrics.set_headroom("w\te\xc3\xa9", INFINITY);
  const auto found = samples(metrics);
  EXPECT_EQ(found.at("holdfast_watched_value{name=\"a\\\"b\\\\c\\nd\xef\xbf\xbd\"}"), "NaN");
  EXPECT_EQ(found.at("holdfast_headroom_used_ratio{tensor=\"w\te\xc3\xa9\"}"), "+Inf");
}

TEST(Metrics, TheFirstNamesAreKept) {
  NamedValues values;
  for (int round = 0; round < 2; ++round) {
    for (int i = 0; i < 100; ++i) values.set("name" + std::to_string(i), round * 1000 + i);
  }
  std::map<std::string, double> found;
  values.each([&](const std::string& name, double value) { found[name] = value; });
  EXPECT_EQ(found.size(), NamedValues::kMost);
  EXPECT_EQ(found.at("name0"), 1000);
  EXPECT_EQ(found.at("name63"), 1063);
}

TEST(Metrics, AReaderSeesWholeNamesWhileTheyAreAdded) {
  NamedValues values;
  std::thread writer([&] {
    for (int i = 0; i < 64; ++i) values.set("name" + std::to_string(i), i);
  });
  for (std::size_t seen = 0; seen < 64;) {
    std::size_t now = 0;
    values.each([&](const std::string& name, double value) {
      EXPECT_EQ(name, "name" + std::to_string(static_cast<int>(value)));
      ++now;
    });
    EXPECT_GE(now, seen);
    seen = now;
  }
  writer.join();
}

}  // namespace
}  // namespace holdfast
