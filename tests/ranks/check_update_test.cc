// The optimizer stage: what the update would write, or has written.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <stdexcept>
#include <string>

#include "coord/events.h"
#include "ranks/guarded_ranks.h"

namespace holdfast {
namespace {

constexpr int kRanks = 4;

// An attempt that is applied, in whose update `values` were written on the ranks that `writes`.
Decision attempt_writing(StepGuard& guard, bool writes, float value) {
  return attempt(
      guard, [] {},
      [&] {
        const std::vector<float> written = {1.0f, 2.0f, writes ? value : 3.0f, 4.0f};
        guard.observe_written("fc.bias", TensorView::of(written));
      });
}

TEST(CheckUpdateAfter, IsTheDefault) {
  run_guarded(2, guard_options(), [](StepGuard& guard, int) { EXPECT_FALSE(guard.checks_update_before()); });
  run_guarded(2, guard_options("check_update: BEFORE"),
              [](StepGuard& guard, int) { EXPECT_TRUE(guard.checks_update_before()); });
}

TEST(CheckUpdateAfter, WhatEveryRankWroteEndsTheNextAttemptWith85) {
  for (const float value : {kNanF, kInfF, -kInfF}) {
    const TempDir temp;
    Decisions decisions(kRanks);
    run_guarded(kRanks, guard_options("", temp / "run"), [&](StepGuard& guard, int rank) {
      decisions.add(rank, attempt_writing(guard, false, value));
      decisions.add(rank, attempt_writing(guard, true, value));
      // With those parameters everything is non-finite from forward on.
      decisions.add(rank, attempt(guard, [&] {
                      observe_values(guard, Stage::kForward, "logits", {kNanF});
                      observe_values(guard, Stage::kBackward, "fc.weight", {kNanF, kNanF});
                    }));
    });
    EXPECT_EQ(decisions.agreed_actions(), (Actions{"APPLY", "APPLY", "ABORT 85"}));
    EXPECT_NE(decisions.agreed()[2].reason.find("fc.bias[2]"), std::string::npos)
        << decisions.agreed()[2].reason;
    EXPECT_NE(decisions.agreed()[2].reason.find("after an update there is 1 non-finite value at"), std::string::npos);
    const Json event = events_named(temp / "run", "aborted").at(0);
    EXPECT_EQ(event["stage"], "optimizer");
    EXPECT_EQ(event["attempt"], 2);
    EXPECT_EQ(event["exit_code"], 85);
    EXPECT_EQ(event["origins"][0]["tensor"], "fc.bias");
    EXPECT_EQ(event["origins"][0]["index"], 2);
    EXPECT_EQ(event["nan"], std::isnan(value) ? 1 : 0);
    EXPECT_EQ(event["pos_inf"], value == kInfF ? 1 : 0);
    EXPECT_EQ(event["neg_inf"], value == -kInfF ? 1 : 0);
  }
}

// Where the ranks did not write the same, there is no count of one replica: all are added up.
TEST(CheckUpdateAfter, DifferentFindingsOfTheRanksAreAddedUp) {
  const TempDir temp;
  run_guarded(2, guard_options("", temp / "run"), [&](StepGuard& guard, int rank) {
    attempt(
        guard, [] {},
        [&] {
          const std::vector<float> written = {rank == 0 ? kNanF : 1.0f, rank == 1 ? kNanF : 1.0f};
          guard.observe_written("w", TensorView::of(written));
        });
    attempt(guard, [] {});
  });
  EXPECT_EQ(events_named(temp / "run", "aborted").at(0)["nan"], 2);
}

TEST(CheckUpdateAfter, AWriteThatWentWrongOnOneRankIsCountedAsItIs) {
  const TempDir temp;
  run_guarded(kRanks, guard_options("", temp / "run"), [&](StepGuard& guard, int rank) {
    attempt_writing(guard, rank == 3, kInfF);
    attempt(guard, [] {});
  });
  const Json event = events_named(temp / "run", "aborted").at(0);
  EXPECT_EQ(event["pos_inf"], 1);
  ASSERT_EQ(event["origins"].size(), 1u);
  EXPECT_EQ(event["origins"][0]["rank"], 3);
}

// More tensors than a rank names, and more ranks than a node reports: the count is whole all the same.
TEST(CheckUpdateAfter, TheCountOfOneReplicaHoldsBeyondWhatIsNamed) {
  const TempDir temp;
  run_guarded(7, guard_options("", temp / "run"), [&](StepGuard& guard, int) {
    attempt(
        guard, [] {},
        [&] {
          for (int tensor = 0; tensor < 40; ++tensor) {
            guard.observe_written("w" + std::to_string(tensor), TensorView::of(std::vector<float>(5, kNanF)));
          }
        });
    attempt(guard, [] {});
  });
  EXPECT_EQ(events_named(temp / "run", "aborted").at(0)["nan"], 200);
}

TEST(CheckUpdateAfter, WhatOneRankAloneWroteMeansThatReplicasDiffer) {
  for (int writer = 0; writer < kRanks; ++writer) {
    Decisions decisions(kRanks);
    run_guarded(kRanks, guard_options(), [&](StepGuard& guard, int rank) {
      decisions.add(rank, attempt_writing(guard, rank == writer, kNanF));
      decisions.add(rank, attempt(guard, [] {}));
    });
    EXPECT_EQ(decisions.agreed_actions(), (Actions{"APPLY", "ABORT 83"})) << writer;
  }
}

TEST(CheckUpdateAfter, AllButOneRankMeansThatReplicasDiffer) {
  Decisions decisions(kRanks);
  run_guarded(kRanks, guard_options(), [&](StepGuard& guard, int rank) {
    decisions.add(rank, attempt_writing(guard, rank != 0, kInfF));
    decisions.add(rank, attempt(guard, [] {}));
  });
  EXPECT_EQ(decisions.agreed_actions(), (Actions{"APPLY", "ABORT 83"}));
}

// An exception leaves the update half done, whatever the others wrote.
TEST(CheckUpdateAfter, AnUpdateThatThrewOnOneRankMeansThatReplicasDifferEvenWhenTheOthersWroteNan) {
  for (int thrower = 0; thrower < kRanks; ++thrower) {
    Decisions decisions(kRanks);
    run_guarded(kRanks, guard_options(), [&](StepGuard& guard, int rank) {
      guard.begin();
      decisions.add(rank, guard.decide());
      guard.update([&] {
        if (rank == thrower) throw std::runtime_error("out of memory");
        guard.observe_written("w", TensorView::of(std::vector<float>{kNanF}));
      });
      guard.finish();
      decisions.add(rank, attempt(guard, [] {}));
    });
    EXPECT_EQ(decisions.agreed_actions(), (Actions{"APPLY", "ABORT 83"})) << thrower;
  }
}

TEST(CheckUpdateAfter, InTheLastUpdateItIsFoundByClose) {
  const TempDir temp;
  Decisions decisions(kRanks);
  run_guarded(kRanks, guard_options("", temp / "run"), [&](StepGuard& guard, int rank) {
    decisions.add(rank, attempt_writing(guard, true, kNanF));
    decisions.add(rank, guard.close());
  });
  EXPECT_EQ(decisions.agreed_actions(), (Actions{"APPLY", "ABORT 85"}));
  EXPECT_EQ(events_named(temp / "run", "aborted").at(0)["stage"], "optimizer");
  EXPECT_TRUE(events_named(temp / "run", "run_finished").empty());
}

TEST(CheckUpdateAfter, InTheLastUpdateOfOneRankItIsFoundByClose) {
  Decisions decisions(kRanks);
  run_guarded(kRanks, guard_options(), [&](StepGuard& guard, int rank) {
    decisions.add(rank, attempt_writing(guard, rank == 3, kNanF));
    decisions.add(rank, guard.close());
  });
  EXPECT_EQ(decisions.agreed_actions(), (Actions{"APPLY", "ABORT 83"}));
}

TEST(CheckUpdateAfter, FiniteValuesThatWereWrittenSayNothing) {
  Decisions decisions(kRanks);
  run_guarded(kRanks, guard_options("max_total_skips: 0"), [&](StepGuard& guard, int rank) {
    for (int i = 0; i < 3; ++i) decisions.add(rank, attempt_writing(guard, true, 3.4e38f));
    decisions.add(rank, guard.close());
  });
  EXPECT_EQ(decisions.agreed_actions(), (Actions(4, "APPLY")));
}

const std::vector<BucketSlice> kLayout = {{"fc.weight", 3, 10}, {"fc.bias", 16, 5}};

// Each rank looks at its share of the prospective update; fc.bias[3] is in one rank's share only.
void observe_prospective(StepGuard& guard, float value) {
  std::vector<float> prospective(24, 1.0f);
  prospective[16 + 3] = value;
  for (const SharePiece& piece : guard.share(kLayout)) {
    guard.observe(Stage::kOptimizer, piece.tensor,
                  TensorView::of(prospective).slice(piece.bucket_offset, piece.count), piece.begin);
  }
}

TEST(CheckUpdateBefore, AFindingIsASkipAndNothingIsWritten) {
  for (const float value : {kNanF, kInfF, -kInfF}) {
    const TempDir temp;
    Decisions decisions(kRanks);
    run_guarded(kRanks, guard_options("check_update: BEFORE", temp / "run"), [&](StepGuard& guard, int rank) {
      int written = 0;
      for (const float prospective : {1.0f, value, 1.0f}) {
        decisions.add(rank, attempt(
                                guard, [&] { observe_prospective(guard, prospective); }, [&] { ++written; }));
      }
      EXPECT_EQ(written, 2);
      EXPECT_EQ(guard.updates(), 2u);
      EXPECT_EQ(guard.attempt(), 3u);
      decisions.add(rank, guard.close());
    });
    EXPECT_EQ(decisions.agreed_actions(), (Actions{"APPLY", "SKIP", "APPLY", "APPLY"}));
    const Json event = events_named(temp / "run", "attempt_skipped").at(0);
    EXPECT_EQ(event["stage"], "optimizer");
    EXPECT_EQ(event["total"], 1);
    ASSERT_EQ(event["origins"].size(), 1u);
    EXPECT_EQ(event["origins"][0]["tensor"], "fc.bias");
    EXPECT_EQ(event["origins"][0]["index"], 3);
    EXPECT_EQ(event["nan"].get<int>() + event["pos_inf"].get<int>() + event["neg_inf"].get<int>(), 1);
  }
}

TEST(CheckUpdateBefore, AGradientThatIsNonFiniteIsBlamedAndNotTheUpdateMadeOfIt) {
  const TempDir temp;
  run_guarded(kRanks, guard_options("check_update: BEFORE", temp / "run"), [&](StepGuard& guard, int rank) {
    attempt(guard, [&] {
      observe_values(guard, Stage::kBackward, "fc.weight", {rank == 2 ? kNanF : 1.0f});
      observe_prospective(guard, kNanF);
    });
  });
  const Json event = events_named(temp / "run", "attempt_skipped").at(0);
  EXPECT_EQ(event["stage"], "backward");
  ASSERT_EQ(event["origins"].size(), 1u);
  EXPECT_EQ(event["origins"][0]["rank"], 2);
}

// Every rank makes the same update; whose share it is found in says nothing of a device.
TEST(CheckUpdateBefore, FindingsInTheUpdateMakeNoDeviceASuspect) {
  const TempDir temp;
  run_guarded(kRanks, guard_options("check_update: BEFORE suspect_after_incidents: 1", temp / "run"),
              [&](StepGuard& guard, int) {
                for (int i = 0; i < 5; ++i) attempt(guard, [&] { observe_prospective(guard, kNanF); });
              });
  const std::vector<Json> skipped = events_named(temp / "run", "attempt_skipped");
  ASSERT_EQ(skipped.size(), 5u);
  ASSERT_EQ(skipped[4]["origins"].size(), 1u);
  EXPECT_EQ(skipped[4]["origins"][0]["hardware_suspect"], false);
}

TEST(Share, CoversEachElementOnceInPiecesOfEvenSize) {
  const std::vector<std::vector<BucketSlice>> layouts = {
      kLayout,
      {},
      {{"empty", 4, 0}},
      {{"one", 7, 1}},
      {{"b", 40, 3}, {"empty", 0, 0}, {"a", 2, 30}, {"c", 50, 1}},  // not in the bucket's order
      {{"x", 0, 1}, {"y", 1, 1}, {"z", 2, 1}, {"w", 3, 1}, {"v", 4, 1}}};
  for (const auto& layout : layouts) {
    std::int64_t total = 0;
    for (const BucketSlice& slice : layout) total += slice.count;
    for (int ranks = 1; ranks <= 9; ++ranks) {
      std::vector<std::vector<SharePiece>> shares(static_cast<std::size_t>(ranks));
      run_guarded(ranks, guard_options(), [&](StepGuard& guard, int rank) {
        shares[static_cast<std::size_t>(rank)] = guard.share(layout);
      });
      std::map<std::pair<std::string, std::int64_t>, int> seen;
      for (const auto& share : shares) {
        std::int64_t size = 0;
        for (const SharePiece& piece : share) {
          EXPECT_GT(piece.count, 0);
          size += piece.count;
          const auto slice = std::ranges::find(layout, piece.tensor, &BucketSlice::tensor);
          ASSERT_NE(slice, layout.end());
          EXPECT_EQ(piece.bucket_offset, slice->offset + piece.begin);
          for (std::int64_t i = 0; i < piece.count; ++i) ++seen[{std::string(piece.tensor), piece.begin + i}];
        }
        EXPECT_GE(size, total / ranks);
        EXPECT_LE(size, (total + ranks - 1) / ranks);
      }
      EXPECT_EQ(static_cast<std::int64_t>(seen.size()), total) << ranks;
      for (const BucketSlice& slice : layout) {
        for (std::int64_t i = 0; i < slice.count; ++i) {
          EXPECT_EQ((seen[{std::string(slice.tensor), i}]), 1) << slice.tensor << "[" << i << "], " << ranks;
        }
      }
    }
  }
}

}  // namespace
}  // namespace holdfast
