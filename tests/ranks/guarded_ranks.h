// Ranks as threads, each with its guard.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "holdfast/collectives/thread_collective.h"
#include "holdfast/step_guard.h"

namespace holdfast {

inline bool mentions(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

inline constexpr float kNanF = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kInfF = std::numeric_limits<float>::infinity();

// A policy under which any number of attempts is skipped.
inline constexpr char kSkipAnything[] =
    "max_total_skips: 1000000 max_consecutive_skips: 1000000 on_error: SKIP";

// The watchdog would end the test's whole process.
inline GuardOptions guard_options(const std::string& policy = "", const std::string& run_dir = "") {
  GuardOptions options;
  options.policy = policy;
  options.run_dir = run_dir;
  options.watchdog = false;
  return options;
}

inline std::unique_ptr<StepGuard> create_guard(Collective& collective, const GuardOptions& options) {
  std::unique_ptr<StepGuard> guard;
  const Status status = StepGuard::create(collective, options, &guard);
  EXPECT_TRUE(status.ok()) << status.to_string();
  return guard;
}

// Calls body(guard, rank) on each of `ranks` ranks. The body must not leave early.
inline void run_guarded(int ranks, const GuardOptions& options,
                        const std::function<void(StepGuard&, int)>& body) {
  ThreadGroup(ranks).run([&](Collective& collective) {
    const auto guard = create_guard(collective, options);
    if (guard) body(*guard, collective.rank());
  });
}

// One attempt as a trainer makes it: `work` runs between begin() and decide(), `update` after APPLY.
template <typename Work, typename Update>
Decision attempt(StepGuard& guard, Work&& work, Update&& update) {
  guard.begin();
  work();
  const Decision decision = guard.decide();
  if (decision.apply()) guard.update(update);
  guard.finish();
  return decision;
}
template <typename Work>
Decision attempt(StepGuard& guard, Work&& work) {
  return attempt(guard, std::forward<Work>(work), [] {});
}

inline void observe_values(StepGuard& guard, Stage stage, const std::string& tensor,
                           const std::vector<float>& values) {
  guard.observe(stage, tensor, TensorView::of(values));
}

// What each rank was told, attempt by attempt; each rank writes its own.
class Decisions {
 public:
  explicit Decisions(int ranks) : by_rank_(static_cast<std::size_t>(ranks)) {}
  void add(int rank, const Decision& decision) {
    by_rank_[static_cast<std::size_t>(rank)].push_back(decision);
  }

  // The decisions of rank 0, after checking that every rank was told the same.
  const std::vector<Decision>& agreed() const {
    for (std::size_t r = 1; r < by_rank_.size(); ++r) {
      EXPECT_EQ(by_rank_[r].size(), by_rank_[0].size()) << "rank " << r;
      for (std::size_t i = 0; i < std::min(by_rank_[r].size(), by_rank_[0].size()); ++i) {
        const Decision& mine = by_rank_[r][i];
        const Decision& rank0 = by_rank_[0][i];
        EXPECT_EQ(mine.action, rank0.action) << "rank " << r << ", attempt " << i;
        EXPECT_EQ(mine.code, rank0.code) << "rank " << r << ", attempt " << i;
        EXPECT_EQ(mine.reason, rank0.reason) << "rank " << r << ", attempt " << i;
        EXPECT_EQ(mine.last_attempt_with_data, rank0.last_attempt_with_data)
            << "rank " << r << ", attempt " << i;
        EXPECT_TRUE(mine.agreed && rank0.agreed);
      }
    }
    return by_rank_[0];
  }
  const std::vector<Decision>& of(int rank) const { return by_rank_[static_cast<std::size_t>(rank)]; }

  std::vector<std::string> agreed_actions() const {
    std::vector<std::string> actions;
    for (const Decision& decision : agreed()) {
      actions.push_back(std::string(action_name(decision.action)) +
                        (decision.exit_code() == 0 ? "" : " " + std::to_string(decision.exit_code())));
    }
    return actions;
  }

 private:
  std::vector<std::vector<Decision>> by_rank_;
};

using Actions = std::vector<std::string>;

}  // namespace holdfast
