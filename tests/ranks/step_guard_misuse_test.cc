// What a trainer does wrong is said, and never ends in a crash or in an update.
#include <gtest/gtest.h>

#include "coord/events.h"
#include "ranks/guarded_ranks.h"

namespace holdfast {
namespace {

TEST(StepGuardMisuse, ATensorThatCannotBeLookedAtIsItsRanksErrorAndNeverClean) {
  const TempDir temp;
  Decisions decisions(2);
  const std::vector<float> values(4, 1.0f);
  run_guarded(2, guard_options(kSkipAnything, temp / "run"), [&](StepGuard& guard, int rank) {
    const auto look_at = [&](const TensorView& view) {
      decisions.add(rank, attempt(guard, [&] {
                      if (rank == 1) guard.observe(Stage::kBackward, "w", view);
                    }));
    };
    look_at(TensorView::contiguous(nullptr, DType::kFloat32, 4));
    look_at(TensorView::contiguous(values.data(), DType::kFloat32, -4));
    look_at(TensorView::contiguous(nullptr, DType::kFloat32, 0));
  });
  EXPECT_EQ(decisions.agreed_actions(), (Actions{"SKIP", "SKIP", "APPLY"}));
  const std::vector<Json> events = events_named(temp / "run", "attempt_skipped");
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[0]["error"]["rank"], 1);
  EXPECT_EQ(events[0]["error"]["what"], "w has 4 elements and no memory, and cannot be scanned");
  EXPECT_EQ(events[1]["error"]["what"], "w has -4 elements, and cannot be scanned");
}

TEST(StepGuardMisuse, AStageThatThereIsNotAndProbesForAnotherLayoutAreErrors) {
  Decisions decisions(2);
  run_guarded(2, guard_options(kSkipAnything), [&](StepGuard& guard, int rank) {
    std::vector<float> values(4, 1.0f);
    const TensorView view = TensorView::of(values);
    for (const int stage : {17, -1}) {
      decisions.add(rank, attempt(guard, [&] {
                      if (rank == 1) guard.observe(static_cast<Stage>(stage), "w", view);
                    }));
    }
    const BucketSlice layout{"w", 0, 4};
    const std::vector<Probe> probes = {scan(view), scan(view)};
    decisions.add(rank, attempt(guard, [&] { guard.observe_reduced(view, {&layout, 1}, probes); }));
    decisions.add(rank, attempt(guard, [&] {
                    guard.observe_reduced(view, {&layout, 1}, {probes.data(), 1});
                  }));
  });
  EXPECT_EQ(decisions.agreed_actions(), (Actions{"SKIP", "SKIP", "SKIP", "APPLY"}));
  EXPECT_TRUE(mentions(decisions.agreed()[0].reason, "w was observed at stage number 17, which there is not"))
      << decisions.agreed()[0].reason;
  EXPECT_TRUE(mentions(decisions.agreed()[2].reason, "2 probes for a layout of 1 tensors"))
      << decisions.agreed()[2].reason;
}

TEST(StepGuardMisuse, AnUpdateIsCountedOnceHoweverOftenItIsFinished) {
  run_guarded(1, guard_options(), [](StepGuard& guard, int) {
    guard.begin();
    EXPECT_TRUE(guard.decide().apply());
    guard.finish();
    guard.finish();
    EXPECT_EQ(guard.updates(), 1u);
  });
}

TEST(StepGuardMisuse, StateIsRegisteredOnce) {
  std::vector<float> weights(2 * 4, 1.0f);
  run_guarded(2, guard_options(), [&](StepGuard& guard, int rank) {
    const auto state = [&] {
      TrainingState made;
      made.add(StateTensor{.name = "weights", .data = weights.data() + 4 * rank, .shape = {4}});
      return made;
    };
    EXPECT_TRUE(guard.register_state(state()).ok());
    const Status again = guard.register_state(state());
    EXPECT_EQ(again.code(), StatusCode::kUsage);
    EXPECT_EQ(again.message(), "register_state() a second time: the state is told once, all of it");
  });
}

TEST(StepGuardMisuse, GoingBackWithoutCheckpointsEndsTheRun) {
  run_guarded(2, guard_options(), [](StepGuard& guard, int) {
    const Decision decision = guard.roll_back();
    EXPECT_EQ(decision.action, Action::kAbort);
    EXPECT_EQ(decision.exit_code(), 64);
    EXPECT_EQ(decision.reason, "roll_back() without checkpoints: there is nothing to go back to");
  });
}

}  // namespace
}  // namespace holdfast
