// What the policy says is what every rank does.
#include <gtest/gtest.h>

#include <stdexcept>

#include "coord/events.h"
#include "ranks/guarded_ranks.h"

namespace holdfast {
namespace {

// Four ranks, one attempt for each entry of `bad`: true puts a NaN into the loss of rank 1.
Actions actions_for(const std::string& policy, const std::vector<bool>& bad,
                    const std::string& run_dir = "") {
  Decisions decisions(4);
  run_guarded(4, guard_options(policy, run_dir), [&](StepGuard& guard, int rank) {
    for (const bool now : bad) {
      decisions.add(rank, attempt(guard, [&] { guard.observe_loss(now && rank == 1 ? kNanF : 1.0); }));
      if (decisions.of(rank).back().ends_run()) break;
    }
  });
  return decisions.agreed_actions();
}

// Field case 2.
TEST(StepGuardPolicy, OnFirstAbortEndsTheRunWith81OnEveryRank) {
  const TempDir temp;
  EXPECT_EQ(actions_for("on_first: ABORT", {false, true, false}, temp / "run"),
            (Actions{"APPLY", "ABORT 81"}));
  EXPECT_TRUE(events_named(temp / "run", "attempt_skipped").empty());
  const Json event = events_named(temp / "run", "aborted").at(0);
  EXPECT_EQ(event["exit_code"], 81);
  EXPECT_EQ(event["attempt"], 1);
  EXPECT_EQ(event["origins"][0]["rank"], 1);
}

TEST(StepGuardPolicy, SkipsInARowAreAllowedExactlyUpToTheBudget) {
  const std::string policy = "max_consecutive_skips: 2";
  EXPECT_EQ(actions_for(policy, {true, true, false}), (Actions{"SKIP", "SKIP", "APPLY"}));
  EXPECT_EQ(actions_for(policy, {true, true, true}), (Actions{"SKIP", "SKIP", "ABORT 81"}));
  EXPECT_EQ(actions_for(policy, {true, true, false, true, true, true}),
            (Actions{"SKIP", "SKIP", "APPLY", "SKIP", "SKIP", "ABORT 81"}));
}

TEST(StepGuardPolicy, SkipsInAllAreAllowedExactlyUpToTheBudget) {
  const std::string policy = "max_total_skips: 3";
  EXPECT_EQ(actions_for(policy, {true, false, true, false, true, false}),
            (Actions{"SKIP", "APPLY", "SKIP", "APPLY", "SKIP", "APPLY"}));
  EXPECT_EQ(actions_for(policy, {true, false, true, false, true, false, true}),
            (Actions{"SKIP", "APPLY", "SKIP", "APPLY", "SKIP", "APPLY", "ABORT 81"}));
}

TEST(StepGuardPolicy, ABudgetOfNoneAbortsAtTheFirst) {
  EXPECT_EQ(actions_for("max_total_skips: 0", {true}), Actions{"ABORT 81"});
  EXPECT_EQ(actions_for("max_consecutive_skips: 0", {true}), Actions{"ABORT 81"});
}

TEST(StepGuardPolicy, ElevenInARowAreTooManyByDefault) {
  Actions expected(10, "SKIP");
  expected.push_back("ABORT 81");
  EXPECT_EQ(actions_for("", std::vector<bool>(20, true)), expected);
}

// Field case 2: one rank raises and the others do not hang.
TEST(StepGuardPolicy, AnExceptionOnOneRankAbortsAllWith80) {
  const TempDir temp;
  Decisions decisions(4);
  run_guarded(4, guard_options("", temp / "run"), [&](StepGuard& guard, int rank) {
    decisions.add(rank, attempt(guard, [&] {
                    const bool healthy = guard.run(Stage::kForward, [&] {
                      if (rank == 1) throw std::runtime_error("cannot read shard 7");
                    });
                    EXPECT_EQ(healthy, rank != 1);
                    EXPECT_EQ(guard.healthy(), rank != 1);
                  }));
  });
  EXPECT_EQ(decisions.agreed_actions(), Actions{"ABORT 80"});
  EXPECT_NE(decisions.agreed()[0].reason.find("exception on rank 1"), std::string::npos);
  const Json event = events_named(temp / "run", "aborted").at(0);
  EXPECT_EQ(event["stage"], "forward");
  EXPECT_EQ(event["error"]["rank"], 1);
  EXPECT_EQ(event["error"]["what"], "cannot read shard 7");
}

TEST(StepGuardPolicy, AnExceptionUnderSkipSkipsOnAllAndTheNextAttemptIsHealthy) {
  Decisions decisions(4);
  run_guarded(4, guard_options("on_error: SKIP"), [&](StepGuard& guard, int rank) {
    for (int a = 0; a < 2; ++a) {
      decisions.add(rank, attempt(guard, [&] {
                      EXPECT_TRUE(guard.healthy());
                      guard.run(Stage::kBackward, [&] {
                        if (rank == 3 && a == 0) throw 42;  // not even a std::exception
                      });
                    }));
    }
  });
  EXPECT_EQ(decisions.agreed_actions(), (Actions{"SKIP", "APPLY"}));
  EXPECT_NE(decisions.agreed()[0].reason.find("unknown type"), std::string::npos)
      << decisions.agreed()[0].reason;
}

TEST(StepGuardPolicy, AfterAnErrorTheRestOfTheAttemptIsNotRunOnThatRank) {
  run_guarded(2, guard_options("on_error: SKIP"), [](StepGuard& guard, int rank) {
    int calls = 0;
    attempt(guard, [&] {
      guard.run(Stage::kForward, [&] {
        if (rank == 0) throw std::runtime_error("x");
      });
      guard.run(Stage::kBackward, [&] { ++calls; });
    });
    EXPECT_EQ(calls, rank == 0 ? 0 : 1);
  });
}

TEST(StepGuardPolicy, AnErrorThatTheTrainerReportsItselfCountsAlike) {
  Decisions decisions(2);
  run_guarded(2, guard_options(), [&](StepGuard& guard, int rank) {
    decisions.add(rank, attempt(guard, [&] {
                    if (rank == 1) guard.report_error(Stage::kInput, "no such sample");
                    if (rank == 1) guard.report_error(Stage::kForward, "and so no output");
                  }));
  });
  EXPECT_EQ(decisions.agreed_actions(), Actions{"ABORT 80"});
  EXPECT_NE(decisions.agreed()[0].reason.find("at input: no such sample"),
            std::string::npos);  // the first one
}

// A trainer that throws at its own NaN is an exception to `on_error` and a finding to the record.
TEST(StepGuardPolicy, ANanThatMadeTheTrainerThrowIsStillAttributed) {
  const TempDir temp;
  Decisions decisions(2);
  run_guarded(2, guard_options("on_error: SKIP", temp / "run"), [&](StepGuard& guard, int rank) {
    decisions.add(rank, attempt(guard, [&] {
                    guard.run(Stage::kLoss, [&] {
                      guard.observe_loss(rank == 1 ? kNanF : 1.0);
                      if (rank == 1) throw std::runtime_error("loss is NaN");
                    });
                  }));
  });
  EXPECT_EQ(decisions.agreed_actions(), Actions{"SKIP"});
  const Json event = events_named(temp / "run", "attempt_skipped").at(0);
  EXPECT_EQ(event["origins"].at(0)["rank"], 1);
  EXPECT_EQ(event["origins"][0]["tensor"], "loss");
  EXPECT_EQ(event["error"]["what"], "loss is NaN");
}

// Field case 32.
TEST(StepGuardPolicy, TenBadAttemptsAreTenEventsAndNoUpdate) {
  const TempDir temp;
  run_guarded(4, guard_options("", temp / "run"), [&](StepGuard& guard, int rank) {
    int updates_run = 0;
    for (int a = 0; a < 10; ++a) {
      attempt(
          guard, [&] { guard.observe_loss(rank == 2 ? kNanF : 1.0); }, [&] { ++updates_run; });
    }
    EXPECT_EQ(updates_run, 0);
    EXPECT_EQ(guard.updates(), 0u);
    EXPECT_EQ(guard.skips(), 10u);
    EXPECT_EQ(guard.attempt(), 10u);
    EXPECT_TRUE(guard.close().apply());
  });
  const std::vector<Json> events = events_named(temp / "run", "attempt_skipped");
  ASSERT_EQ(events.size(), 10u);
  EXPECT_EQ(events.back()["consecutive"], 10);
  EXPECT_EQ(events.back()["update"], 0);
  for (const Json& event : events) EXPECT_EQ(event["loss"], "nan");
}

TEST(StepGuardPolicy, CountersAreTheSameOnEveryRankAndCountWhatWasDecided) {
  run_guarded(3, guard_options(kSkipAnything), [](StepGuard& guard, int rank) {
    EXPECT_EQ(guard.epoch(), 1u);
    EXPECT_EQ(guard.attempt(), 0u);
    std::uint64_t updates = 0;
    std::uint64_t skips = 0;
    for (std::uint64_t a = 0; a < 20; ++a) {
      const bool bad = a % 3 == 1;
      attempt(guard, [&] {
        EXPECT_EQ(guard.attempt(), a);
        guard.observe_loss(bad && rank == static_cast<int>(a % 3) ? kNanF : 1.0);
      });
      ++(bad ? skips : updates);
      EXPECT_EQ(guard.attempt(), a + 1);
      EXPECT_EQ(guard.updates(), updates);
      EXPECT_EQ(guard.skips(), skips);
    }
  });
}

TEST(StepGuardPolicy, TheEffectivePolicyIsShownInFull) {
  run_guarded(2, guard_options("{\"on_first\": \"ABORT\"}"), [](StepGuard& guard, int) {
    EXPECT_NE(guard.policy_text().find("on_first: ABORT\n"), std::string::npos);
    EXPECT_NE(guard.policy_text().find("max_total_skips: 100\n"), std::string::npos);
  });
}

}  // namespace
}  // namespace holdfast
