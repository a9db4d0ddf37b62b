// Field case 15: ranks whose data end at different times stop together, told one attempt earlier.
#include <gtest/gtest.h>

#include <stdexcept>

#include "coord/events.h"
#include "ranks/guarded_ranks.h"

namespace holdfast {
namespace {

constexpr int kRanks = 4;

struct Outcome {
  Decisions decisions{kRanks};
  std::vector<int> updates = std::vector<int>(kRanks);
  Decision close[kRanks];
};

// Each rank trains until it is told that the data are at an end, whatever it has left. `trouble` is called in
// each attempt.
Outcome train(const std::vector<int>& batches,
              const std::function<void(StepGuard&, int rank, int attempt)>& trouble,
              const std::string& run_dir = "") {
  Outcome run;
  GuardOptions options;
  options.run_dir = run_dir;
  options.watchdog = false;
  run_guarded(kRanks, options, [&](StepGuard& guard, int rank) {
    const auto r = static_cast<std::size_t>(rank);
    for (int number = 0;; ++number) {
      // Nobody is ever asked for a batch that it has not.
      EXPECT_LT(number, batches[r]) << "rank " << rank;
      if (number >= batches[r]) return;
      const Decision decision = attempt(
          guard,
          [&] {
            if (number + 1 == batches[r]) guard.no_next_batch();
            trouble(guard, rank, number);
          },
          [&] { ++run.updates[r]; });
      run.decisions.add(rank, decision);
      if (decision.ends_run()) return;
      if (decision.last_attempt_with_data) break;
    }
    run.close[rank] = guard.close();
  });
  return run;
}

const auto kNoTrouble = [](StepGuard&, int, int) {};

TEST(UnevenData, AllStopAfterTheShortestAndAreToldInItsLastAttempt) {
  for (int shortest = 0; shortest < kRanks; ++shortest) {
    std::vector<int> batches(kRanks, 4);
    batches[static_cast<std::size_t>(shortest)] = 3;
    const Outcome run = train(batches, kNoTrouble);
    EXPECT_EQ(run.decisions.agreed_actions(), (Actions{"APPLY", "APPLY", "APPLY"}));
    EXPECT_FALSE(run.decisions.agreed()[0].last_attempt_with_data);
    EXPECT_FALSE(run.decisions.agreed()[1].last_attempt_with_data);
    EXPECT_TRUE(run.decisions.agreed()[2].last_attempt_with_data);
    EXPECT_EQ(run.updates, std::vector<int>(kRanks, 3));
    for (const Decision& close : run.close) EXPECT_TRUE(close.apply()) << close.reason;
  }
}

TEST(UnevenData, EvenDataEndForAllInTheirLastAttempt) {
  const Outcome run = train(std::vector<int>(kRanks, 2), kNoTrouble);
  EXPECT_EQ(run.decisions.agreed_actions(), (Actions{"APPLY", "APPLY"}));
  EXPECT_FALSE(run.decisions.agreed()[0].last_attempt_with_data);
  EXPECT_TRUE(run.decisions.agreed()[1].last_attempt_with_data);
}

TEST(UnevenData, ASingleBatchIsAnnouncedInTheFirstAttempt) {
  const Outcome run = train({9, 1, 9, 9}, kNoTrouble);
  EXPECT_EQ(run.decisions.agreed_actions(), Actions{"APPLY"});
  EXPECT_EQ(run.updates, std::vector<int>(kRanks, 1));
}

TEST(UnevenData, ASkipInTheLastAttemptStopsAllTheSame) {
  for (const int bad : {0, 3}) {  // the rank that runs dry, and another
    const TempDir temp;
    const Outcome run = train(
        {3, 4, 4, 4},
        [&](StepGuard& guard, int rank, int number) {
          if (rank == bad && number == 2) guard.observe_loss(kNanF);
        },
        temp / "run");
    EXPECT_EQ(run.decisions.agreed_actions(), (Actions{"APPLY", "APPLY", "SKIP"}));
    EXPECT_TRUE(run.decisions.agreed()[2].last_attempt_with_data);
    EXPECT_EQ(run.updates, std::vector<int>(kRanks, 2));
    for (const Decision& close : run.close) EXPECT_TRUE(close.apply()) << close.reason;
    const Json finished = events_named(temp / "run", "run_finished").at(0);
    EXPECT_EQ(finished["attempt"], 3);
    EXPECT_EQ(finished["update"], 2);
    EXPECT_EQ(finished["skips"], 1);
  }
}

TEST(UnevenData, ASkipOfEveryAttemptStopsAllTheSame) {
  const Outcome run = train({3, 4, 4, 4}, [](StepGuard& guard, int rank, int) {
    if (rank == 1) guard.observe_loss(kInfF);
  });
  EXPECT_EQ(run.decisions.agreed_actions(), (Actions{"SKIP", "SKIP", "SKIP"}));
  EXPECT_EQ(run.updates, std::vector<int>(kRanks, 0));
}

TEST(UnevenData, AnErrorOnTheRankThatRunsDryStillAnnouncesIt) {
  Outcome run;
  GuardOptions options;
  options.policy = "on_error: SKIP";
  options.watchdog = false;
  run_guarded(kRanks, options, [&](StepGuard& guard, int rank) {
    run.decisions.add(rank, attempt(guard, [&] {
                        if (rank == 0) guard.no_next_batch();
                        guard.run(Stage::kForward, [&] {
                          if (rank == 0) throw std::runtime_error("x");
                        });
                      }));
  });
  EXPECT_EQ(run.decisions.agreed_actions(), Actions{"SKIP"});
  EXPECT_TRUE(run.decisions.agreed()[0].last_attempt_with_data);
}

// Absence is never read as "finite".
TEST(UnevenData, ARankThatStopsWithoutSayingSoIsMissedByTheOthers) {
  std::vector<Decision> decisions(kRanks);
  ThreadGroup(kRanks, std::chrono::milliseconds(500)).run([&](Collective& collective) {
    GuardOptions options;
    options.watchdog = false;
    const auto guard = create_guard(collective, options);
    if (!guard || collective.rank() == 0) return;
    decisions[static_cast<std::size_t>(collective.rank())] = attempt(*guard, [] {});
  });
  for (std::size_t r = 1; r < kRanks; ++r) {
    EXPECT_EQ(decisions[r].action, Action::kAbort);
    EXPECT_EQ(decisions[r].exit_code(), 84);
    EXPECT_FALSE(decisions[r].agreed);
  }
}

}  // namespace
}  // namespace holdfast
