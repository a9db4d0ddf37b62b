// The reduced gradients: each rank scans its share, and together they see each element once.
#include <gtest/gtest.h>

#include "coord/events.h"
#include "ranks/guarded_ranks.h"

namespace holdfast {
namespace {

// Tensors a, b and c with `total` elements together, apart in the bucket, in an order of their own.
struct Bucket {
  explicit Bucket(std::int64_t total) {
    const std::int64_t a = total / 2;
    const std::int64_t b = (total - a) / 3;
    const std::int64_t c = total - a - b;
    layout = {{"a", c + 2, a}, {"b", c + 2 + a + 3, b}, {"c", 0, c}};
    values.assign(static_cast<std::size_t>(total + 5), kNanF);  // padding
    for (const BucketSlice& slice : layout) {
      for (std::int64_t i = 0; i < slice.count; ++i) values[static_cast<std::size_t>(slice.offset + i)] = 1;
    }
  }
  std::vector<BucketSlice> layout;
  std::vector<float> values;
};

TEST(StepGuardShare, EachElementIsLookedAtByExactlyOneRank) {
  for (int ranks = 1; ranks <= 9; ++ranks) {
    for (const std::int64_t total : {1, 2, 3, 5, 7, 8, 9, 10, 17, 1025}) {
      Decisions decisions(ranks);
      run_guarded(ranks, guard_options(kSkipAnything), [&](StepGuard& guard, int rank) {
        Bucket bucket(total);
        // All clean: the shares touch no padding.
        decisions.add(
            rank, attempt(guard, [&] { guard.observe_share(TensorView::of(bucket.values), bucket.layout); }));
        // All bad: each counted, and counted once.
        std::fill(bucket.values.begin(), bucket.values.end(), kInfF);
        decisions.add(
            rank, attempt(guard, [&] { guard.observe_share(TensorView::of(bucket.values), bucket.layout); }));
      });
      const std::string all =
          std::to_string(total) + (total == 1 ? " non-finite value " : " non-finite values ");
      ASSERT_EQ(decisions.agreed_actions(), (Actions{"APPLY", "SKIP"})) << ranks << " ranks, " << total;
      EXPECT_TRUE(decisions.agreed()[1].reason.starts_with(all + "at reduction"))
          << ranks << " ranks, " << total << ": " << decisions.agreed()[1].reason;
    }
  }
}

TEST(StepGuardShare, EachElementIsNamedByItsTensorAndIndex) {
  for (const int ranks : {1, 2, 3, 4, 7, 9}) {
    for (const std::int64_t total : {1, 2, 5, 13}) {
      run_guarded(ranks, guard_options(kSkipAnything), [&](StepGuard& guard, int) {
        Bucket bucket(total);
        for (const BucketSlice& slice : bucket.layout) {
          for (std::int64_t i = 0; i < slice.count; ++i) {
            float& element = bucket.values[static_cast<std::size_t>(slice.offset + i)];
            element = -kInfF;
            const Decision decision =
                attempt(guard, [&] { guard.observe_share(TensorView::of(bucket.values), bucket.layout); });
            element = 1;
            EXPECT_TRUE(
                decision.reason.starts_with("1 non-finite value at reduction, first on rank ") &&
                decision.reason.ends_with(" in " + std::string(slice.tensor) + "[" + std::to_string(i) + "]"))
                << ranks << " ranks, " << total << ": " << decision.reason;
          }
        }
      });
    }
  }
}

TEST(StepGuardShare, AnEmptyLayoutIsClean) {
  Decisions decisions(3);
  run_guarded(3, guard_options(), [&](StepGuard& guard, int rank) {
    const std::vector<float> bucket(4, kNanF);
    const std::vector<BucketSlice> nothing = {{"a", 2, 0}};
    decisions.add(rank, attempt(guard, [&] {
                    guard.observe_share(TensorView::of(bucket), {});
                    guard.observe_share(TensorView::of(bucket), nothing);
                    guard.observe_share(TensorView::contiguous(nullptr, DType::kFloat32, 0), {});
                  }));
  });
  EXPECT_EQ(decisions.agreed_actions(), Actions{"APPLY"});
}

// What a trainer does between backward and decide(): its own all-reduce, here exact and in one place.
std::vector<float> sum_of(const std::vector<std::vector<float>>& gradients) {
  std::vector<float> sum(gradients[0].size(), 0.0f);
  for (const auto& gradient : gradients) {
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += gradient[i];
  }
  return sum;
}

TEST(StepGuardReduction, AnOverflowBornInTheSumIsSeenOnceAndBlamesNoRanksBackward) {
  const TempDir temp;
  Decisions decisions(4);
  run_guarded(4, guard_options("", temp / "run"), [&](StepGuard& guard, int rank) {
    std::vector<std::vector<float>> gradients(4, std::vector<float>(11, 1.0f));
    for (auto& gradient : gradients) gradient[6] = 3e38f;  // finite on each
    decisions.add(rank, attempt(guard, [&] {
                    const std::vector<BucketSlice> layout = {{"w", 0, 4}, {"b", 4, 7}};
                    guard.observe_bucket(Stage::kBackward,
                                         TensorView::of(gradients[static_cast<std::size_t>(rank)]), layout);
                    guard.observe_share(TensorView::of(sum_of(gradients)), layout);
                  }));
  });
  EXPECT_EQ(decisions.agreed_actions(), Actions{"SKIP"});
  const Json event = events_named(temp / "run", "attempt_skipped").at(0);
  EXPECT_EQ(event["stage"], "reduction");
  EXPECT_EQ(event["pos_inf"], 1);
  EXPECT_EQ(event["nan"], 0);
  ASSERT_EQ(event["origins"].size(), 1u);
  EXPECT_EQ(event["origins"][0]["tensor"], "b");
  EXPECT_EQ(event["origins"][0]["index"], 2);
}

// Field case 33: the sum carries the NaN to every rank; only the rank that made it is named.
TEST(StepGuardReduction, TheShadowOfALocalNanInTheSumIsNotAnOrigin) {
  for (int bad = 0; bad < 4; ++bad) {
    const TempDir temp;
    Decisions decisions(4);
    run_guarded(4, guard_options("", temp / "run"), [&](StepGuard& guard, int rank) {
      std::vector<std::vector<float>> gradients(4, std::vector<float>(11, 1.0f));
      gradients[static_cast<std::size_t>(bad)][9] = kNanF;
      decisions.add(rank, attempt(guard, [&] {
                      const std::vector<BucketSlice> layout = {{"w", 0, 4}, {"b", 4, 7}};
                      guard.observe_bucket(Stage::kBackward,
                                           TensorView::of(gradients[static_cast<std::size_t>(rank)]), layout);
                      guard.observe_share(TensorView::of(sum_of(gradients)), layout);
                    }));
    });
    EXPECT_EQ(decisions.agreed_actions(), Actions{"SKIP"});
    const Json event = events_named(temp / "run", "attempt_skipped").at(0);
    EXPECT_EQ(event["stage"], "backward");
    EXPECT_EQ(event["nan"], 1);
    ASSERT_EQ(event["origins"].size(), 1u);
    EXPECT_EQ(event["origins"][0]["rank"], bad);
    EXPECT_EQ(event["origins"][0]["stage"], "backward");
    EXPECT_EQ(event["origins"][0]["tensor"], "b");
    EXPECT_EQ(event["origins"][0]["index"], 5);
    EXPECT_TRUE(mentions(decisions.agreed()[0].reason, "1 non-finite value at backward"));
  }
}

std::vector<Probe> probes_of(const Bucket& bucket) {
  std::vector<Probe> probes;
  for (const BucketSlice& slice : bucket.layout) {
    probes.push_back(scan(TensorView::of(bucket.values).slice(slice.offset, slice.count)));
  }
  return probes;
}

TEST(StepGuardReduced, AScanOfAllOfItIsCountedOnce) {
  for (const int ranks : {1, 2, 4, 7}) {
    Decisions decisions(ranks);
    run_guarded(ranks, guard_options(kSkipAnything), [&](StepGuard& guard, int rank) {
      Bucket bucket(100);
      const auto see = [&] {
        guard.observe_reduced(TensorView::of(bucket.values), bucket.layout, probes_of(bucket));
      };
      decisions.add(rank, attempt(guard, see));
      bucket.values[static_cast<std::size_t>(bucket.layout[1].offset + 7)] = kInfF;
      decisions.add(rank, attempt(guard, see));
    });
    ASSERT_EQ(decisions.agreed_actions(), (Actions{"APPLY", "SKIP"})) << ranks;
    const std::string& reason = decisions.agreed()[1].reason;
    EXPECT_TRUE(reason.starts_with("1 non-finite value at reduction, first on rank ") &&
                reason.ends_with(" in b[7]"))
        << reason;
  }
}

TEST(StepGuardReduced, MemoryThatWentBadOnOneRankAfterTheSumIsSeenWhereverItIs) {
  constexpr int kRanks = 4;
  for (int broken = 0; broken < kRanks; ++broken) {
    for (const std::int64_t index : {0, 30, 60, 99}) {
      Decisions decisions(kRanks);
      run_guarded(kRanks, guard_options(kSkipAnything), [&](StepGuard& guard, int rank) {
        Bucket bucket(100);
        bucket.layout = {{"all", 0, 100}};
        std::fill(bucket.values.begin(), bucket.values.end(), 1.0f);
        if (rank == broken) bucket.values[static_cast<std::size_t>(index)] = kNanF;
        decisions.add(rank, attempt(guard, [&] {
                        guard.observe_reduced(TensorView::of(bucket.values), bucket.layout,
                                              probes_of(bucket));
                      }));
      });
      ASSERT_EQ(decisions.agreed_actions(), (Actions{"SKIP"})) << broken << ", " << index;
      EXPECT_TRUE(mentions(decisions.agreed()[0].reason, " rank " + std::to_string(broken)))
          << decisions.agreed()[0].reason;
    }
  }
}

}  // namespace
}  // namespace holdfast
