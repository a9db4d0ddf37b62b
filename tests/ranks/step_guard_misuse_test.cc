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
