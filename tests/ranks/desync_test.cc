// Ranks that do not do the same thing leave together with 83, and the odd ones are named.
#include <gtest/gtest.h>

#include "coord/events.h"
#include "ranks/guarded_ranks.h"

namespace holdfast {
namespace {

constexpr int kDisagree = 83;

GuardOptions unwatched(const std::string& policy = "", const std::string& run_dir = "") {
  GuardOptions options;
  options.policy = policy;
  options.run_dir = run_dir;
  options.watchdog = false;
  return options;
}

std::string hex_hash_of_nothing_but(const std::string& reason, const std::string& before) {
  const auto at = reason.find(before);
  if (at == std::string::npos) return "";
  const auto from = at + before.size();
  return reason.substr(from, reason.find_first_not_of("0123456789abcdef", from) - from);
}

// One attempt in which `rank_skews` of the ranks did something before it; what every rank was told.
Decision after(int ranks, const std::function<void(StepGuard&, int)>& skew, const std::string& run_dir = "") {
  Decisions decisions(ranks);
  run_guarded(ranks, unwatched("", run_dir), [&](StepGuard& guard, int rank) {
    skew(guard, rank);
    decisions.add(rank, attempt(guard, [] {}));
  });
  return decisions.agreed().at(0);
}

TEST(Desync, ARankAtAnotherAttemptIsNamedOnEveryRank) {
  for (int odd = 0; odd < 4; ++odd) {
    const Decision decision = after(4, [&](StepGuard& guard, int rank) {
      if (rank == odd) guard.finish();
    });
    EXPECT_EQ(decision.action, Action::kAbort);
    EXPECT_EQ(decision.exit_code(), kDisagree);
    EXPECT_TRUE(decision.reason.starts_with("ranks disagree: rank " + std::to_string(odd) +
                                            " at epoch 1, attempt 1, policy "))
        << decision.reason;
    EXPECT_NE(decision.reason.find("; the other 3: rank "), std::string::npos) << decision.reason;
    EXPECT_NE(decision.reason.find(" at epoch 1, attempt 0, policy "), std::string::npos) << decision.reason;
  }
}

TEST(Desync, OfTwoRanksBothAreNamed) {
  const Decision decision = after(2, [](StepGuard& guard, int rank) {
    if (rank == 1) guard.finish();
  });
  EXPECT_EQ(decision.exit_code(), kDisagree);
  EXPECT_NE(decision.reason.find("rank 0 at epoch 1, attempt 0, "), std::string::npos) << decision.reason;
  EXPECT_NE(decision.reason.find("rank 1 at epoch 1, attempt 1, "), std::string::npos) << decision.reason;
  EXPECT_EQ(decision.reason.find("the other"), std::string::npos) << decision.reason;
}

TEST(Desync, ADisagreementIsAnAbortOnRecord) {
  const TempDir temp;
  after(
      3,
      [](StepGuard& guard, int rank) {
        if (rank == 2) guard.finish();
      },
      temp / "run");
  const std::vector<Json> aborted = events_named(temp / "run", "aborted");
  ASSERT_EQ(aborted.size(), 1u);
  EXPECT_EQ(aborted[0]["exit_code"], kDisagree);
  EXPECT_EQ(aborted[0]["code"], "RANKS_DISAGREE");
  EXPECT_NE(aborted[0]["reason"].get<std::string>().find("rank 2 at epoch 1, attempt 1"), std::string::npos);
}

// Far more than the reports of bad ranks that a node may send: a minority cannot be told from some of the
// ranks.
TEST(Desync, EveryRankSaysWhereItIs) {
  const Decision decision = after(12, [](StepGuard& guard, int rank) {
    if (rank >= 10) guard.finish();
  });
  EXPECT_NE(decision.reason.find("rank 10,11 at epoch 1, attempt 1, "), std::string::npos) << decision.reason;
  EXPECT_NE(decision.reason.find("the other 10: "), std::string::npos) << decision.reason;
}

TEST(Desync, ARankThatIsOutOfStepAndBadIsOutOfStep) {
  Decisions decisions(3);
  run_guarded(3, unwatched("on_error: SKIP"), [&](StepGuard& guard, int rank) {
    if (rank == 1) guard.finish();
    decisions.add(rank, attempt(guard, [&] {
                    if (rank == 1) guard.observe_loss(kNanF);
                    if (rank == 2) guard.report_error(Stage::kForward, "x");
                  }));
  });
  EXPECT_EQ(decisions.agreed_actions(), Actions{"ABORT 83"});
  EXPECT_NE(decisions.of(0)[0].reason.find("rank 1 at epoch 1, attempt 1"), std::string::npos);
}

TEST(Desync, ARankWithAnotherPolicyIsNamed) {
  for (const int odd : {0, 2}) {
    Decisions decisions(3);
    ThreadGroup(3).run([&](Collective& collective) {
      const int rank = collective.rank();
      const auto guard = create_guard(collective, unwatched(rank == odd ? "max_total_skips: 99" : ""));
      decisions.add(rank, attempt(*guard, [] {}));
    });
    const Decision decision = decisions.agreed().at(0);
    EXPECT_EQ(decision.exit_code(), kDisagree);
    const std::string odd_text =
        "ranks disagree: rank " + std::to_string(odd) + " at epoch 1, attempt 0, policy ";
    const std::string other_text = odd == 0 ? "the other 2: rank 1,2 at epoch 1, attempt 0, policy "
                                            : "the other 2: rank 0,1 at epoch 1, attempt 0, policy ";
    const std::string odd_hash = hex_hash_of_nothing_but(decision.reason, odd_text);
    const std::string other_hash = hex_hash_of_nothing_but(decision.reason, other_text);
    EXPECT_FALSE(odd_hash.empty()) << decision.reason;
    EXPECT_FALSE(other_hash.empty()) << decision.reason;
    EXPECT_NE(odd_hash, other_hash);
  }
}

TEST(Desync, AgreementInAnotherNotationIsAgreement) {
  Decisions decisions(2);
  ThreadGroup(2).run([&](Collective& collective) {
    const auto guard = create_guard(
        collective,
        unwatched(collective.rank() == 0 ? "max_total_skips: 99" : "{\"max_total_skips\": \"99\"}"));
    decisions.add(collective.rank(), attempt(*guard, [] {}));
  });
  EXPECT_EQ(decisions.agreed_actions(), Actions{"APPLY"});
}

// ---- the number of ranks

std::vector<Status> create_with(int ranks, const std::function<int(int rank)>& expected,
                                const std::string& run_dir = "") {
  std::vector<Status> statuses(static_cast<std::size_t>(ranks));
  ThreadGroup(ranks).run([&](Collective& collective) {
    GuardOptions options = unwatched("", run_dir);
    options.expected_ranks = expected(collective.rank());
    std::unique_ptr<StepGuard> guard;
    auto& status = statuses[static_cast<std::size_t>(collective.rank())];
    status = StepGuard::create(collective, options, &guard);
    EXPECT_EQ(guard != nullptr, status.ok());
  });
  return statuses;
}

TEST(ExpectedRanks, TheRightNumberOrNoneIsAccepted) {
  for (const int expected : {0, 3}) {
    for (const Status& status : create_with(3, [&](int) { return expected; })) {
      EXPECT_TRUE(status.ok()) << status.to_string();
    }
  }
}

TEST(ExpectedRanks, AnyOtherNumberIs83OnEveryRankWithBothNumbers) {
  for (const int expected : {1, 2, 4, -1}) {
    for (const Status& status : create_with(3, [&](int) { return expected; })) {
      EXPECT_EQ(status.exit_code(), kDisagree);
      EXPECT_EQ(status.message(),
                "rank 0: " + std::to_string(expected) + " ranks are expected, but 3 take part");
    }
  }
}

TEST(ExpectedRanks, OneRankThatExpectsAnotherNumberIsNamedOnEveryRank) {
  for (const Status& status : create_with(3, [](int rank) { return rank == 2 ? 4 : 3; })) {
    EXPECT_EQ(status.exit_code(), kDisagree);
    EXPECT_EQ(status.message(), "rank 2: 4 ranks are expected, but 3 take part");
  }
}

// Whoever corrects the mistake starts the same command again.
TEST(ExpectedRanks, AStartThatWasRefusedLeavesTheRunFolderToTheNext) {
  const TempDir temp;
  for (const Status& status : create_with(
           3, [](int rank) { return rank == 2 ? 4 : 3; }, temp / "run")) {
    EXPECT_EQ(status.exit_code(), kDisagree);
  }
  for (const Status& status : create_with(
           3, [](int) { return 3; }, temp / "run")) {
    EXPECT_TRUE(status.ok()) << status.to_string();
  }
}

}  // namespace
}  // namespace holdfast
