// Trains for two attempts under the guard, the second with a NaN on the last rank. Returns 0 when all ranks
// applied the first and skipped the second.
#include <atomic>
#include <cstdio>
#include <limits>

#include "holdfast/collectives/thread_collective.h"
#include "holdfast/step_guard.h"

int main() {
  std::atomic<int> as_expected{0};
  holdfast::ThreadGroup(2).run([&](holdfast::Collective& collective) {
    std::unique_ptr<holdfast::StepGuard> guard;
    if (const auto status = holdfast::StepGuard::create(collective, {}, &guard); !status.ok()) {
      std::fprintf(stderr, "%s\n", status.to_string().c_str());
      return;
    }
    for (const bool bad : {false, true}) {
      guard->begin();
      guard->observe_loss(bad && collective.rank() == 1 ? std::numeric_limits<double>::quiet_NaN() : 1.0);
      const holdfast::Decision decision = guard->decide();
      if (decision.apply()) guard->update([] {});
      guard->finish();
      if (decision.action == (bad ? holdfast::Action::kSkip : holdfast::Action::kApply)) ++as_expected;
    }
    if (guard->close().apply()) ++as_expected;
  });
  return as_expected == 6 ? 0 : 1;
}
