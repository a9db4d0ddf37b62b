// The sequence of collectives is the same on every rank whatever happens, and a collective that fails never
// applies.
#include <gtest/gtest.h>

#include <stdexcept>

#include "holdfast/collectives/verdict.h"
#include "ranks/collective_decorators.h"
#include "ranks/guarded_ranks.h"

namespace holdfast {
namespace {

using std::chrono::milliseconds;

constexpr int kRanks = 4;

struct Watched {
  std::vector<std::string> calls = std::vector<std::string>(kRanks);
  std::vector<std::size_t> sent = std::vector<std::size_t>(kRanks);
};

// The collectives of one attempt of four ranks in which `work` happens, rank by rank.
Watched watch(const std::function<void(StepGuard&, int)>& work) {
  Watched watched;
  ThreadGroup(kRanks).run([&](Collective& collective) {
    RecordingCollective recording(collective);
    const auto guard = create_guard(recording, guard_options("on_error: SKIP"));
    recording.calls.clear();
    recording.sent = 0;
    attempt(*guard, [&] { work(*guard, collective.rank()); });
    watched.calls[static_cast<std::size_t>(collective.rank())] = recording.calls;
    watched.sent[static_cast<std::size_t>(collective.rank())] = recording.sent;
  });
  return watched;
}

using Calls = std::vector<std::string>;

TEST(StepGuardSequence, ACleanAttemptIsOneCollective) {
  const Watched watched = watch([](StepGuard& guard, int) { guard.observe_loss(1); });
  EXPECT_EQ(watched.calls, Calls(kRanks, "R"));
}

// Field case 17: whatever differs between the ranks, they call the same operations.
TEST(StepGuardSequence, AnAttemptThatIsNotCleanIsTheSameThreeOnEveryRank) {
  const std::vector<std::function<void(StepGuard&, int)>> troubles = {
      [](StepGuard& guard, int rank) { guard.observe_loss(rank == 1 ? kNanF : 1); },
      [](StepGuard& guard, int) { guard.observe_loss(kNanF); },
      [](StepGuard& guard, int rank) {
        guard.run(Stage::kForward, [&] {
          if (rank == 0) throw std::runtime_error("x");
        });
      },
      [](StepGuard& guard, int rank) {
        if (rank == 3) guard.request_stop();
      },
      [](StepGuard& guard, int rank) {  // one micro-batch of four, on one rank
        for (int i = 0; i < 4; ++i) {
          guard.micro_batch(i);
          guard.run(Stage::kForward, [&] {
            if (rank == 1 && i == 2) throw std::runtime_error("invalid batch");
            observe_values(guard, Stage::kForward, "logits", {1});
          });
        }
      },
      [](StepGuard& guard, int rank) {
        if (rank == 2) guard.finish();  // a rank that lost count
      },
  };
  for (std::size_t i = 0; i < troubles.size(); ++i) {
    EXPECT_EQ(watch(troubles[i]).calls, Calls(kRanks, "RGB")) << "trouble " << i;
  }
}

TEST(StepGuardSequence, OnlyTheRanksThatAreBadSendAnything) {
  const Watched watched =
      watch([](StepGuard& guard, int rank) { guard.observe_loss(rank == 2 ? kNanF : 1); });
  for (std::size_t r = 0; r < kRanks; ++r) EXPECT_EQ(watched.sent[r] > 0, r == 2) << r;
}

// What a later stage is full of says nothing that the earliest does not.
TEST(StepGuardSequence, AReportIsAboutTheEarliestStageOnly) {
  const auto forward = [](StepGuard& guard, int rank) {
    observe_values(guard, Stage::kForward, "logits", {rank == 2 ? kNanF : 1});
  };
  const Watched alone = watch(forward);
  const Watched with_more = watch([&](StepGuard& guard, int rank) {
    forward(guard, rank);
    for (int tensor = 0; tensor < 10; ++tensor) observe_values(guard, Stage::kBackward, "w", {kNanF});
  });
  EXPECT_EQ(alone.sent, with_more.sent);
}

// Every rank holds the same sum: what is bad in it alone is no rank's own.
TEST(StepGuardSequence, OnlyFindingsOfItsOwnMakingMakeARankBad) {
  for (const bool local : {false, true}) {
    ThreadGroup(kRanks).run([&](Collective& collective) {
      CorruptingCollective looking(collective);
      const auto guard = create_guard(looking, guard_options());
      Record sum;
      looking.change_sum = [&](Record& record) { sum = record; };
      const std::vector<float> reduced = {1, 2, 3, kInfF};
      const std::vector<BucketSlice> layout = {{"w", 0, 4}};
      attempt(*guard, [&] {
        if (local && collective.rank() == 2) observe_values(*guard, Stage::kBackward, "w", {kNanF, kNanF});
        guard->observe_share(TensorView::of(reduced), layout);
      });
      EXPECT_EQ(sum.bad(Stage::kReduction), (BadCounts{0, 1, 0}));
      EXPECT_EQ(sum.bad(Stage::kBackward), (BadCounts{local ? 2u : 0u, 0, 0}));
      EXPECT_EQ(sum.bad_ranks(), local ? 1u : 0u);
      EXPECT_EQ(sum.bad_rank_sum(), local ? 2u : 0u);
    });
  }
}

// Field case 16: an accumulation window that was skipped leaves nothing behind for the next.
TEST(StepGuardSequence, WindowsHaveTheirBoundariesWhateverIsInThem) {
  std::vector<std::string> calls(kRanks);
  Decisions decisions(kRanks);
  ThreadGroup(kRanks).run([&](Collective& collective) {
    const int rank = collective.rank();
    RecordingCollective recording(collective);
    const auto guard = create_guard(recording, guard_options());
    recording.calls.clear();
    for (int window = 0; window < 3; ++window) {
      decisions.add(rank, attempt(*guard, [&] {
                      for (int i = 0; i < 4; ++i) {
                        guard->micro_batch(i);
                        const bool bad = window == 1 && i == 2 && rank == 1;
                        observe_values(*guard, Stage::kBackward, "w", {bad ? kNanF : 1});
                      }
                    }));
    }
    calls[static_cast<std::size_t>(rank)] = recording.calls;
  });
  EXPECT_EQ(calls, Calls(kRanks, "RRGBR"));
  EXPECT_EQ(decisions.agreed_actions(), (Actions{"APPLY", "SKIP", "APPLY"}));
}

// What each rank got from an attempt during which the collective of some ranks failed.
struct Outcome {
  Decision decision;
  float buffer = 0;
};

std::vector<Outcome> with_failing(char operation, bool takes_part, const std::function<bool(int)>& fails_on,
                                  bool clean) {
  std::vector<Outcome> outcomes(kRanks);
  ThreadGroup group(kRanks, milliseconds(1000));
  group.run([&](Collective& collective) {
    const int rank = collective.rank();
    FailingCollective failing(collective);
    const auto guard = create_guard(failing, guard_options());
    float buffer = 1;
    guard->protect(&buffer, sizeof(buffer));
    if (fails_on(rank)) failing.armed = operation;
    failing.takes_part = takes_part;
    guard->begin();
    buffer = 2;
    guard->observe_loss(rank == 1 && !clean ? kNanF : 1);
    outcomes[static_cast<std::size_t>(rank)] = {guard->decide(), buffer};
  });
  return outcomes;
}

void expect_cut_off(const Outcome& outcome, const std::string& what) {
  EXPECT_EQ(outcome.decision.action, Action::kAbort) << what;
  EXPECT_FALSE(outcome.decision.agreed) << what;
  EXPECT_EQ(outcome.decision.exit_code(), 84) << what;
  EXPECT_FALSE(outcome.decision.reason.empty()) << what;
  EXPECT_EQ(outcome.buffer, 1) << what;
}

TEST(StepGuardFailures, ACollectiveThatFailsOnAnyRankAbortsEveryRankAndRestoresItsBuffers) {
  for (const char operation : {'R', 'G', 'B'}) {
    for (const int failing : {-1, 0, 2}) {  // -1: on all
      const auto outcomes = with_failing(
          operation, false, [&](int rank) { return failing < 0 || rank == failing; }, false);
      for (int r = 0; r < kRanks; ++r) {
        expect_cut_off(
            outcomes[static_cast<std::size_t>(r)],
            std::string(1, operation) + " on " + std::to_string(failing) + ", rank " + std::to_string(r));
      }
    }
  }
}

// The watchdogs are asked who is missing, and let the ranks go on to their own end when nobody is.
TEST(StepGuardFailures, WithWatchdogsATransportThatFailsThoughNobodyIsMissingEndsTheRunOrderly) {
  ThreadGroup(2).run([](Collective& collective) {
    FailingCollective failing(collective);
    GuardOptions options = guard_options();
    options.watchdog = true;
    const auto guard = create_guard(failing, options);
    failing.armed = 'R';
    guard->begin();
    const Decision decision = guard->decide();
    EXPECT_EQ(decision.exit_code(), 84);
    EXPECT_EQ(decision.reason, "link down");
    EXPECT_FALSE(decision.agreed);
  });
}

TEST(StepGuardFailures, ACleanAttemptIsNotAppliedWhenItsCollectiveFails) {
  for (const int failing : {0, 3}) {
    for (const Outcome& outcome : with_failing(
             'R', false, [&](int rank) { return rank == failing; }, true)) {
      expect_cut_off(outcome, "clean, failing on rank " + std::to_string(failing));
    }
  }
}

TEST(StepGuardFailures, ARankThatDoesNotGetTheResultNeverApplies) {
  for (const char operation : {'R', 'G', 'B'}) {
    const auto outcomes = with_failing(
        operation, true, [](int rank) { return rank == 2; }, operation == 'R');
    expect_cut_off(outcomes[2], std::string(1, operation) + " lost on rank 2");
  }
}

TEST(StepGuardFailures, TheOthersLearnAtTheNextAttemptThatARankIsGone) {
  Decisions decisions(kRanks);
  ThreadGroup group(kRanks, milliseconds(500));
  group.run([&](Collective& collective) {
    const int rank = collective.rank();
    const auto guard = create_guard(collective, guard_options());
    decisions.add(rank, attempt(*guard, [] {}));
    if (rank == 1) return;  // its process died
    decisions.add(rank, attempt(*guard, [] {}));
  });
  for (const int rank : {0, 2, 3}) {
    EXPECT_TRUE(decisions.of(rank).at(0).apply());
    EXPECT_EQ(decisions.of(rank).at(1).action, Action::kAbort);
    EXPECT_EQ(decisions.of(rank).at(1).exit_code(), 84);
    EXPECT_FALSE(decisions.of(rank).at(1).agreed);
  }
}

// One attempt of two ranks; `sum` and `broadcast` change what arrives at both.
Decisions with_corruption(bool clean, const std::function<void(Record&)>& sum,
                          const std::function<void(Bytes&)>& broadcast, std::string* calls = nullptr) {
  Decisions decisions(2);
  ThreadGroup(2).run([&](Collective& collective) {
    RecordingCollective recording(collective);
    CorruptingCollective corrupting(recording);
    const auto guard = create_guard(corrupting, guard_options(kSkipAnything));
    recording.calls.clear();
    corrupting.change_sum = sum;
    corrupting.change_broadcast = broadcast;
    decisions.add(collective.rank(), attempt(*guard, [&] { guard->observe_loss(clean ? 1.0 : kNanF); }));
    if (calls != nullptr && collective.rank() == 1) *calls = recording.calls;
  });
  return decisions;
}

TEST(StepGuardFailures, ASumThatMissesAParticipantIsNotDiscussedAndNotApplied) {
  std::string calls;
  const Decisions decisions = with_corruption(
      true, [](Record& sum) { sum.lanes()[25] -= 1; }, nullptr, &calls);
  for (const int rank : {0, 1}) {
    EXPECT_EQ(decisions.of(rank).at(0).action, Action::kAbort);
    EXPECT_EQ(decisions.of(rank).at(0).exit_code(), 84);
    EXPECT_FALSE(decisions.of(rank).at(0).agreed);
  }
  EXPECT_EQ(calls, "R");
}

TEST(StepGuardFailures, ASumWithALaneOfALaterVersionIsADisagreement) {
  const Decisions decisions = with_corruption(
      true, [](Record& sum) { sum.lanes()[31] = 1; }, nullptr);
  EXPECT_EQ(decisions.agreed_actions(), Actions{"ABORT 83"});
}

TEST(StepGuardFailures, AMalformedDecisionAborts) {
  for (const Bytes& bytes : {Bytes(), Bytes("garbage"), Bytes("\x08\x63")}) {
    const Decisions decisions = with_corruption(false, nullptr, [&](Bytes& decision) { decision = bytes; });
    for (const int rank : {0, 1}) {
      EXPECT_EQ(decisions.of(rank).at(0).action, Action::kAbort);
      EXPECT_NE(decisions.of(rank).at(0).exit_code(), 0);
      EXPECT_FALSE(decisions.of(rank).at(0).agreed);
    }
  }
}

// A verdict that is not clean never yields APPLY, not even by order.
TEST(StepGuardFailures, AnOrderToApplyABadAttemptIsNotFollowed) {
  const Decisions decisions = with_corruption(false, nullptr, [](Bytes& bytes) {
    bytes = encode_decision({Action::kApply, StatusCode::kOk, {}});
  });
  for (const int rank : {0, 1}) {
    EXPECT_EQ(decisions.of(rank).at(0).action, Action::kAbort);
    EXPECT_FALSE(decisions.of(rank).at(0).agreed);
  }
}

}  // namespace
}  // namespace holdfast
