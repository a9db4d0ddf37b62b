#include "holdfast/coord/acknowledgement.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include "coord/events.h"
#include "coord/sample_incident.h"
#include "holdfast/coord/coordinator.h"
#include "holdfast/coord/policy.h"
#include "holdfast/coord/policy.pb.h"
#include "holdfast/coord/state.h"
#include "holdfast/coord/state.pb.h"

namespace holdfast {
namespace {

// A run that is started and fails again and again.
struct FailingRun {
  explicit FailingRun(const std::string& text = "") { EXPECT_TRUE(parse_policy(text, &policy).ok()); }

  Status start() {
    if (Status s = Coordinator::resume(policy, run_dir, &rank0); !s.ok()) return s;
    rank0->run_started(rank0->memory().epoch(), Topology({basic_placement(0)}));
    return Status();
  }
  // After `attempts` clean ones. The process ends.
  Decision fail(Incident incident, int attempts = 0) {
    const RunState& memory = rank0->memory();
    for (int i = 0; i < attempts; ++i)
      rank0->update_applied(memory.epoch(), memory.attempt(), memory.update());
    incident.epoch = memory.epoch();
    incident.attempt = memory.attempt();
    incident.update = memory.update();
    const Decision decision = rank0->handle(incident);
    rank0.reset();
    return decision;
  }
  Status acknowledge_it() {
    std::string what;
    return acknowledge(run_dir, {"ana", "bad shard removed", ""}, &what);
  }

  const TempDir temp;
  const std::string run_dir = temp / "run";
  Policy policy;
  std::unique_ptr<Coordinator> rank0;
};

bool mentions(const Status& status, const std::string& part) {
  return status.message().find(part) != std::string::npos;
}

TEST(Acknowledgement, AnAbortedRunIsRefusedUntilSomebodyAnswersForIt) {
  FailingRun run("on_first: ABORT authorities { resume: 'the lead' }");
  ASSERT_TRUE(run.start().ok());
  EXPECT_EQ(run.fail(one_nan(2), 3).exit_code(), 81);
  const std::string record = read_file(run.run_dir + "/events.jsonl");
  const std::string state = read_file(run.run_dir + "/state");
  for (int i = 0; i < 2; ++i) {
    const Status refused = run.start();
    EXPECT_EQ(refused.code(), StatusCode::kRestartNotAcknowledged);
    EXPECT_TRUE(mentions(refused, "holdfast ack " + run.run_dir + " --owner")) << refused.message();
    EXPECT_TRUE(mentions(refused, "81")) << refused.message();
    EXPECT_TRUE(mentions(refused, "the lead")) << refused.message();
  }
  EXPECT_EQ(read_file(run.run_dir + "/events.jsonl"), record) << "a refusal leaves no trace to grow";
  EXPECT_EQ(read_file(run.run_dir + "/state"), state);

  std::string what;
  ASSERT_TRUE(acknowledge(run.run_dir, {"ana", "line 1\nline 2 \x1b[31m", "T-1"}, &what).ok());
  EXPECT_NE(what.find("exit code 81 at attempt 3"), std::string::npos) << what;
  const Json event = read_events(run.run_dir).back();
  EXPECT_EQ(event["event"], "acknowledged");
  EXPECT_EQ(event["owner"], "ana");
  EXPECT_EQ(event["note"], "line 1\nline 2 \x1b[31m");
  EXPECT_EQ(event["ticket"], "T-1");
  EXPECT_EQ(event["epoch"], 1);
  EXPECT_EQ(event["attempt"], 3);
  EXPECT_EQ(event["exit_code"], 81);
  EXPECT_TRUE(run.start().ok());
}

TEST(Acknowledgement, WhichEndsNeedOne) {
  Incident disagree = sample_incident(4, [](Record& sum) { sum.set_update_failed(); });
  Incident stop = sample_incident(4, [](Record& sum) { sum.set_request(Request::kStop); });
  Incident exhausted = sample_incident(4, [](Record& sum) { sum.add_bad(Stage::kBackward, {0, 1, 0}); });
  exhausted.loss_scale = LossScaleView{1.0, true};
  Incident spoilt = sample_incident(4, [](Record& sum) {
    for (int rank = 0; rank < 4; ++rank) {
      Record record;
      record.set_update_failed();
      record.add_bad(Stage::kOptimizer, {1, 0, 0});
      sum += record;
    }
  });
  spoilt.views = {sample_view(0, {{Stage::kOptimizer, "w", 0, {1, 0, 0}, -1}})};
  const struct {
    const Incident& incident;
    int exit_code;
    bool needed;
  } ends[] = {{exception_on(1, "boom"), 80, false},
              {exhausted, 82, true},
              {disagree, 83, true},
              {spoilt, 85, true},
              {stop, 86, false}};
  for (const auto& end : ends) {
    FailingRun run;
    ASSERT_TRUE(run.start().ok());
    ASSERT_EQ(run.fail(end.incident).exit_code(), end.exit_code);
    EXPECT_EQ(run.start().code(), end.needed ? StatusCode::kRestartNotAcknowledged : StatusCode::kOk)
        << end.exit_code;
  }
}

TEST(Acknowledgement, WithoutOwnerOrNoteItIsNone) {
  FailingRun run("on_first: ABORT");
  ASSERT_TRUE(run.start().ok());
  run.fail(one_nan(2));
  const std::string record = read_file(run.run_dir + "/events.jsonl");
  std::string what;
  for (const auto& [owner, note] : {std::pair{"", "note"}, {" \t", "note"}, {"ana", ""}, {"ana", "\n"}}) {
    EXPECT_EQ(acknowledge(run.run_dir, {owner, note, ""}, &what).code(), StatusCode::kUsage);
  }
  EXPECT_EQ(read_file(run.run_dir + "/events.jsonl"), record);
  EXPECT_EQ(run.start().code(), StatusCode::kRestartNotAcknowledged);
}

TEST(Acknowledgement, OfNothingIsRefused) {
  FailingRun run;
  std::string what;
  EXPECT_EQ(run.acknowledge_it().code(), StatusCode::kUsage) << "no run at all";
  EXPECT_FALSE(std::filesystem::exists(run.run_dir));
  ASSERT_TRUE(run.start().ok());
  const Status in_use = run.acknowledge_it();
  EXPECT_EQ(in_use.code(), StatusCode::kUsage);
  EXPECT_TRUE(mentions(in_use, "in use")) << in_use.message();
  run.rank0.reset();
  const Status nothing = run.acknowledge_it();
  EXPECT_EQ(nothing.code(), StatusCode::kUsage);
  EXPECT_TRUE(mentions(nothing, "nothing to acknowledge")) << nothing.message();
}

TEST(Acknowledgement, OfADamagedMemoryIsRefused) {
  FailingRun run("on_first: ABORT");
  ASSERT_TRUE(run.start().ok());
  run.fail(one_nan(2));
  write_file(run.run_dir + "/state", "");
  EXPECT_EQ(run.acknowledge_it().code(), StatusCode::kUsage);
  const Status refused = run.start();
  EXPECT_EQ(refused.code(), StatusCode::kUsage) << "never silently reset";
  EXPECT_TRUE(mentions(refused, run.run_dir + "/state")) << refused.message();
}

// Field case 31: NaN always at load+3.
TEST(IdenticalFailures, TheThirdIsNotToBeRequeued) {
  FailingRun run;
  for (int i = 1; i <= 3; ++i) {
    ASSERT_TRUE(run.start().ok()) << i;
    const Decision decision = run.fail(exception_on(1, "boom " + std::to_string(i)), 3);
    EXPECT_EQ(decision.exit_code(), 80);
    EXPECT_EQ(decision.reason.find("do not requeue") != std::string::npos, i == 3) << decision.reason;
  }
  const Status refused = run.start();
  EXPECT_EQ(refused.code(), StatusCode::kRestartNotAcknowledged);
  EXPECT_TRUE(mentions(refused, "do not requeue")) << refused.message();
  EXPECT_TRUE(mentions(refused, "3 times")) << refused.message();

  // After an acknowledgement the row begins anew.
  ASSERT_TRUE(run.acknowledge_it().ok());
  EXPECT_EQ(read_events(run.run_dir).back()["identical_failures"], 3);
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(run.start().ok());
    run.fail(exception_on(1, "boom"), 3);
  }
  EXPECT_TRUE(run.start().ok());
}

TEST(IdenticalFailures, AnAcknowledgementOfEachAbortDoesNotHideThatTheyAreTheSame) {
  FailingRun run("on_first: ABORT max_identical_failures: 2");
  ASSERT_TRUE(run.start().ok());
  EXPECT_EQ(run.fail(one_nan(2), 1).reason.find("do not requeue"), std::string::npos);
  ASSERT_TRUE(run.acknowledge_it().ok());
  ASSERT_TRUE(run.start().ok());
  EXPECT_NE(run.fail(one_nan(2), 1).reason.find("do not requeue"), std::string::npos);
  EXPECT_TRUE(mentions(run.start(), "do not requeue"));
}

TEST(IdenticalFailures, AnotherPlaceOrAnotherStageOrAnEndInBetweenIsNotTheSame) {
  const Incident error = exception_on(1, "boom");
  Incident elsewhere = error;
  elsewhere.views[0].error->stage = Stage::kInput;
  const Incident stop = sample_incident(4, [](Record& sum) { sum.set_request(Request::kStop); });
  const struct {
    const Incident& incident;
    int attempts;
  } others[] = {{error, 2}, {elsewhere, 1}, {stop, 1}};
  for (const auto& other : others) {
    FailingRun run("max_identical_failures: 2");
    ASSERT_TRUE(run.start().ok());
    run.fail(error, 1);
    ASSERT_TRUE(run.start().ok());
    run.fail(other.incident, other.attempts);
    ASSERT_TRUE(run.start().ok());
    run.fail(error, 1);
    EXPECT_TRUE(run.start().ok());
  }
}

// A run that has fallen back to an older checkpoint takes longer to get to the data that it fails on.
TEST(IdenticalFailures, AtTheSameAttemptItIsTheSameHoweverLongAfterAStart) {
  FailingRun run("max_identical_failures: 2");
  ASSERT_TRUE(run.start().ok());
  run.fail(exception_on(1, "boom"), 3);
  ASSERT_TRUE(run.start().ok());
  const Decision decision = run.fail(exception_on(1, "boom"), 0);
  EXPECT_NE(decision.reason.find("do not requeue"), std::string::npos) << decision.reason;
}

TEST(IdenticalFailures, TheHistoryOfEachEpochIsKept) {
  FailingRun run;
  ASSERT_TRUE(run.start().ok());
  run.fail(exception_on(1, "boom"), 5);
  ASSERT_TRUE(run.start().ok());
  run.rank0.reset();
  ASSERT_TRUE(run.start().ok());
  RunState state;
  ASSERT_TRUE(read_state(run.run_dir, &state).ok());
  ASSERT_EQ(state.endings_size(), 2);
  EXPECT_EQ(state.endings(0).epoch(), 1u);
  EXPECT_EQ(state.endings(0).exit_code(), 80);
  EXPECT_EQ(state.endings(0).attempt(), 5u);
  EXPECT_EQ(state.endings(0).attempts_made(), 5u);
  EXPECT_EQ(state.endings(0).stage(), "forward");
  EXPECT_EQ(state.endings(0).rank(), 1);
  EXPECT_EQ(state.endings(1).epoch(), 2u);
  EXPECT_FALSE(state.endings(1).has_exit_code());
}

}  // namespace
}  // namespace holdfast
