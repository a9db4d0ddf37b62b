// A non-finite value anywhere is seen everywhere, and its origin is on record.
#include <gtest/gtest.h>

#include "coord/events.h"
#include "holdfast/coord/incident.h"
#include "ranks/guarded_ranks.h"

namespace holdfast {
namespace {

class StepGuardOnRanks : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, StepGuardOnRanks, testing::Values(1, 2, 4, 8));

TEST_P(StepGuardOnRanks, AFaultOnAnyRankAtAnyStageSkipsOnEveryRankAndNamesItsOrigin) {
  const int ranks = GetParam();
  const TempDir temp;
  Decisions decisions(ranks);
  run_guarded(ranks, guard_options(kSkipAnything, temp / "run"), [&](StepGuard& guard, int rank) {
    for (int stage = 0; stage < kStageCount; ++stage) {
      for (int bad = 0; bad < ranks; ++bad) {
        decisions.add(rank, attempt(guard, [&] {
                        std::vector<float> values(200, 1.0f);
                        if (rank == bad) values[static_cast<std::size_t>(10 * stage + bad)] = kNanF;
                        if (rank == bad) values[150] = -kInfF;
                        observe_values(guard, Stage::kInput, "clean", {1, 2, 3});
                        observe_values(guard, static_cast<Stage>(stage), "t" + std::to_string(stage), values);
                      }));
        decisions.add(rank, attempt(guard, [&] { observe_values(guard, Stage::kLoss, "clean", {1}); }));
      }
    }
  });

  const std::vector<Json> events = events_named(temp / "run", "attempt_skipped");
  ASSERT_EQ(events.size(), static_cast<std::size_t>(kStageCount * ranks));
  ASSERT_EQ(decisions.agreed().size(), 2 * events.size());
  for (std::size_t i = 0; i < events.size(); ++i) {
    EXPECT_EQ(decisions.agreed()[2 * i].action, Action::kSkip);
    EXPECT_EQ(decisions.agreed()[2 * i].exit_code(), 0);
    EXPECT_EQ(decisions.agreed()[2 * i + 1].action, Action::kApply);
    const int stage = static_cast<int>(i) / ranks;
    const int bad = static_cast<int>(i) % ranks;
    const Json& event = events[i];
    EXPECT_EQ(event["attempt"], 2 * i);
    EXPECT_EQ(event["update"], i);
    EXPECT_EQ(event["stage"], stage_name(static_cast<Stage>(stage)));
    EXPECT_EQ(event["nan"], 1);
    EXPECT_EQ(event["pos_inf"], 0);
    EXPECT_EQ(event["neg_inf"], 1);
    EXPECT_EQ(event["consecutive"], 1);
    EXPECT_EQ(event["total"], i + 1);
    ASSERT_EQ(event["origins"].size(), 1u);
    const Json& origin = event["origins"][0];
    EXPECT_EQ(origin["rank"], bad);
    EXPECT_FALSE(origin["host"].get<std::string>().empty());
    EXPECT_EQ(origin["tensor"], "t" + std::to_string(stage));
    EXPECT_EQ(origin["index"], 10 * stage + bad);
    EXPECT_EQ(origin["nan"], 1);
    EXPECT_EQ(origin["neg_inf"], 1);
  }
}

// Field case 1: rank 0's own loss decides nothing.
TEST(StepGuardFaults, ANanLossOnTheLastRankAloneSkipsOnAll) {
  const TempDir temp;
  Decisions decisions(4);
  run_guarded(4, guard_options("", temp / "run"), [&](StepGuard& guard, int rank) {
    decisions.add(rank, attempt(guard, [&] { guard.observe_loss(rank == 3 ? kNanF : 0.5); }));
  });
  EXPECT_EQ(decisions.agreed_actions(), Actions{"SKIP"});
  const Json event = events_named(temp / "run", "attempt_skipped").at(0);
  EXPECT_EQ(event["stage"], "loss");
  EXPECT_EQ(event["loss"], "nan");
  EXPECT_EQ(event["origins"].size(), 1u);
  EXPECT_EQ(event["origins"][0]["rank"], 3);
}

// Field case 3: flags are reduced, never values.
TEST(StepGuardFaults, ANanAmongFiniteLossesIsFlaggedWhicheverRankHoldsIt) {
  Decisions decisions(4);
  run_guarded(4, guard_options(kSkipAnything), [&](StepGuard& guard, int rank) {
    for (int bad = 0; bad < 4; ++bad) {
      decisions.add(rank, attempt(guard, [&] { guard.observe_loss(rank == bad ? kNanF : 1.0 + rank); }));
    }
  });
  EXPECT_EQ(decisions.agreed_actions(), Actions(4, "SKIP"));
}

TEST(StepGuardFaults, FiniteLossesWhoseSumWouldOverflowAreApplied) {
  Decisions decisions(4);
  run_guarded(4, guard_options(), [&](StepGuard& guard, int rank) {
    decisions.add(rank, attempt(guard, [&] {
                    guard.observe_loss(static_cast<double>(3e38f));
                    observe_values(guard, Stage::kLoss, "loss", {3e38f});
                    guard.observe_loss(1.7e308);
                  }));
  });
  EXPECT_EQ(decisions.agreed_actions(), Actions{"APPLY"});
}

// Field case 6, through the guard.
TEST(StepGuardFaults, OneNanInAnyOfFiveTensorsIsCountedOnceAndNamed) {
  const TempDir temp;
  const std::vector<std::size_t> places = {0, 50, 99};
  run_guarded(2, guard_options(kSkipAnything, temp / "run"), [&](StepGuard& guard, int rank) {
    for (int bad = 0; bad < 5; ++bad) {
      for (const std::size_t place : places) {
        attempt(guard, [&] {
          for (int tensor = 0; tensor < 5; ++tensor) {
            std::vector<float> values(100, 1.0f);
            if (rank == 1 && tensor == bad) values[place] = kNanF;
            observe_values(guard, Stage::kBackward, "grad" + std::to_string(tensor), values);
          }
        });
      }
    }
  });
  const std::vector<Json> events = events_named(temp / "run", "attempt_skipped");
  ASSERT_EQ(events.size(), 15u);
  for (std::size_t i = 0; i < events.size(); ++i) {
    EXPECT_EQ(events[i]["nan"], 1);
    ASSERT_EQ(events[i]["origins"].size(), 1u);
    EXPECT_EQ(events[i]["origins"][0]["tensor"], "grad" + std::to_string(i / 3));
    EXPECT_EQ(events[i]["origins"][0]["index"], places[i % 3]);
  }
}

// Field case 9, the guard's part: no type is trusted not to overflow.
TEST(StepGuardFaults, OneInfinityInBf16IsASkipAtDefaultSettings) {
  Decisions decisions(2);
  run_guarded(2, guard_options(), [&](StepGuard& guard, int rank) {
    std::vector<std::uint16_t> gradient(64, 0x3f80);
    if (rank == 0) gradient[33] = 0x7f80;
    decisions.add(rank, attempt(guard, [&] {
                    guard.observe(Stage::kBackward, "w",
                                  TensorView::contiguous(gradient.data(), DType::kBFloat16, 64));
                  }));
  });
  EXPECT_EQ(decisions.agreed_actions(), Actions{"SKIP"});
}

// Field case 12: what no slice covers is not looked at.
TEST(StepGuardFaults, PaddingOfABucketIsNotLookedAt) {
  Decisions decisions(2);
  run_guarded(2, guard_options(), [&](StepGuard& guard, int rank) {
    std::vector<float> bucket(16, 1.0f);
    for (std::size_t i = 10; i < 16; ++i) bucket[i] = kNanF;
    const std::vector<BucketSlice> layout = {{"w", 0, 7}, {"b", 7, 3}};
    decisions.add(rank, attempt(guard, [&] {
                    guard.observe_bucket(Stage::kBackward, TensorView::of(bucket), layout);
                    guard.observe_share(TensorView::of(bucket), layout);
                  }));
  });
  EXPECT_EQ(decisions.agreed_actions(), Actions{"APPLY"});
}

TEST(StepGuardFaults, AFindingInABucketHasItsTensorsNameAndIndex) {
  Decisions decisions(1);
  run_guarded(1, guard_options(), [&](StepGuard& guard, int rank) {
    std::vector<float> bucket(16, 1.0f);
    bucket[12] = kInfF;
    const std::vector<BucketSlice> layout = {{"w", 0, 7}, {"b", 10, 3}};
    decisions.add(rank, attempt(guard, [&] {
                    guard.observe_bucket(Stage::kBackward, TensorView::of(bucket), layout);
                  }));
  });
  EXPECT_TRUE(decisions.agreed().at(0).reason.ends_with(" in b[2]")) << decisions.agreed()[0].reason;
}

// Field case 12 and 17: a finding is never overwritten by a later clean one.
TEST(StepGuardFaults, ANanInTheFirstOfFourMicroBatchesStaysToTheEndOfTheAttempt) {
  const TempDir temp;
  Decisions decisions(2);
  run_guarded(2, guard_options("", temp / "run"), [&](StepGuard& guard, int rank) {
    for (int window = 0; window < 2; ++window) {
      decisions.add(rank, attempt(guard, [&] {
                      for (int i = 0; i < 4; ++i) {
                        guard.micro_batch(i);
                        const bool bad = rank == 1 && window == 0 && i == 1;
                        observe_values(guard, Stage::kBackward, "w", {1, bad ? kNanF : 2});
                      }
                    }));
    }
  });
  EXPECT_EQ(decisions.agreed_actions(), (Actions{"SKIP", "APPLY"}));
  const std::vector<Json> events = events_named(temp / "run", "attempt_skipped");
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0]["nan"], 1);
  EXPECT_EQ(events[0]["origins"][0]["micro_batch"], 1);
}

TEST(StepGuardFaults, SeveralRanksAtTheEarliestStageAreAllOrigins) {
  const TempDir temp;
  run_guarded(4, guard_options("", temp / "run"), [&](StepGuard& guard, int rank) {
    attempt(guard, [&] {
      observe_values(guard, Stage::kForward, "logits", {rank % 2 == 1 ? kInfF : 1});
      observe_values(guard, Stage::kBackward, "w", {kNanF});  // follows on every rank
    });
  });
  const Json event = events_named(temp / "run", "attempt_skipped").at(0);
  EXPECT_EQ(event["stage"], "forward");
  EXPECT_EQ(event["pos_inf"], 2);
  ASSERT_EQ(event["origins"].size(), 2u);
  EXPECT_EQ(event["origins"][0]["rank"], 1);
  EXPECT_EQ(event["origins"][1]["rank"], 3);
  EXPECT_EQ(event["origins"][1]["tensor"], "logits");
}

// When everything is bad a report is short, and the totals are whole all the same.
TEST(StepGuardFaults, AReportIsBoundedAndTheTotalsAreNot) {
  const TempDir temp;
  run_guarded(2, guard_options("", temp / "run"), [&](StepGuard& guard, int rank) {
    attempt(guard, [&] {
      for (int tensor = 0; tensor < 1000; ++tensor) {
        if (rank == 1) observe_values(guard, Stage::kBackward, "t" + std::to_string(tensor), {kNanF, kNanF});
      }
    });
  });
  const Json event = events_named(temp / "run", "attempt_skipped").at(0);
  EXPECT_EQ(event["nan"], 2000);
  EXPECT_EQ(event["origins"][0]["tensor"], "t0");
  EXPECT_EQ(event["origins"][0]["nan"], 2 * kMaxFindingsPerRank);
}

TEST(StepGuardFaults, AnyNameOfATensorReachesTheRecordAsStrictJson) {
  const TempDir temp;
  const std::vector<std::string> names = {"two\nlines", "\"quoted\\", "\xff\xfe", std::string(5000, 'n'), ""};
  run_guarded(2, guard_options(kSkipAnything, temp / "run"), [&](StepGuard& guard, int rank) {
    for (const std::string& name : names) {
      attempt(guard, [&] { observe_values(guard, Stage::kLoss, name, {rank == 1 ? kNanF : 1}); });
    }
  });
  const std::vector<Json> events = events_named(temp / "run", "attempt_skipped");
  ASSERT_EQ(events.size(), names.size());
  EXPECT_EQ(events[0]["origins"][0]["tensor"], "two\nlines");
  EXPECT_EQ(events[1]["origins"][0]["tensor"], "\"quoted\\");
  EXPECT_LT(events[3]["origins"][0]["tensor"].get<std::string>().size(), 2000u);
}

// The logged loss is the mean over the micro-batches, of the class that such a mean has.
TEST(StepGuardFaults, TheLossOfAWindowIsLoggedAsItIs) {
  const std::vector<std::pair<std::vector<double>, Json>> windows = {
      {{1, 2, 3, 6}, 3.0},         {{kNanF, 1, 1, 1}, "nan"}, {{1, 1, 1, kNanF}, "nan"},
      {{1, kInfF}, "inf"},         {{kInfF, 1, 1}, "inf"},    {{-kInfF, 5}, "-inf"},
      {{kInfF, -kInfF, 1}, "nan"}, {{kInfF, kInfF}, "inf"},   {{1e308, 1e308}, 1e308},
      {{1e308, -1e308}, 0.0}};
  const TempDir temp;
  run_guarded(2, guard_options(kSkipAnything, temp / "run"), [&](StepGuard& guard, int rank) {
    for (const auto& [losses, logged] : windows) {
      attempt(guard, [&] {
        for (const double loss : losses) guard.observe_loss(rank == 1 ? loss : 0.5);
        if (rank == 1) observe_values(guard, Stage::kInput, "x", {kNanF});  // so that each is logged
      });
    }
  });
  const std::vector<Json> events = events_named(temp / "run", "attempt_skipped");
  ASSERT_EQ(events.size(), windows.size());
  for (std::size_t i = 0; i < events.size(); ++i) {
    EXPECT_EQ(events[i]["loss"], windows[i].second) << testing::PrintToString(windows[i].first);
  }
}

TEST(StepGuardFaults, ObserveReturnsItsMeasurement) {
  run_guarded(1, guard_options(), [](StepGuard& guard, int) {
    guard.begin();
    const std::vector<float> values = {3, kNanF, -4};
    const Probe probe = guard.observe(Stage::kForward, "x", TensorView::of(values));
    EXPECT_EQ(probe.count, 3u);
    EXPECT_EQ(probe.bad, (BadCounts{1, 0, 0}));
    EXPECT_EQ(probe.first_bad, 1);
    EXPECT_EQ(probe.abs_max, 4);
    EXPECT_EQ(probe.squares.value(), 25);
  });
}

TEST(StepGuardFaults, AMeasurementMadeElsewhereCounts) {
  const TempDir temp;
  run_guarded(1, guard_options(kSkipAnything, temp / "run"), [](StepGuard& guard, int) {
    const std::vector<float> values = {3, kNanF, -4};
    const Probe probe = scan(TensorView::of(values));
    EXPECT_EQ(attempt(guard, [&] { guard.observe_measured(Stage::kForward, "x", probe, 100); }).action,
              Action::kSkip);
  });
  const std::vector<Json> events = events_named(temp / "run", "attempt_skipped");
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0]["origins"][0]["tensor"], "x");
  EXPECT_EQ(events[0]["origins"][0]["index"], 101);
}

TEST(StepGuardFaults, ASparseGradientIsJudgedAsTheOptimizerSeesIt) {
  run_guarded(2, guard_options(kSkipAnything), [](StepGuard& guard, int rank) {
    const std::vector<std::int64_t> rows = {4, 4};
    const std::vector<float> values = {3e38f, 3e38f};
    const auto see = [&](std::int64_t elements) {
      if (rank == 1)
        guard.observe(Stage::kBackward, "embedding", SparseView{rows, TensorView::of(values), elements});
    };
    const Decision decision = attempt(guard, [&] { see(1); });
    EXPECT_EQ(decision.action, Action::kSkip);
    EXPECT_NE(decision.reason.find("in embedding[4]"), std::string::npos) << decision.reason;
    EXPECT_NE(
        attempt(guard, [&] { see(7); }).reason.find("embedding: a sparse gradient of 2 rows of 7 elements"),
        std::string::npos);
  });
}

// Field case 10.
TEST(StepGuardFaults, AnUnknownDtypeIsAnError) {
  run_guarded(2, guard_options(), [](StepGuard& guard, int rank) {
    const Decision decision = attempt(guard, [&] {
      const float one = 1;
      if (rank == 1)
        guard.observe(Stage::kForward, "x", TensorView::contiguous(&one, static_cast<DType>(42), 1));
    });
    EXPECT_EQ(decision.exit_code(), 80);
    EXPECT_NE(decision.reason.find("x has an unknown dtype, number 42"), std::string::npos)
        << decision.reason;
  });
}

}  // namespace
}  // namespace holdfast
