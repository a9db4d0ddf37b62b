// What holds for a run of eight ranks with data, tensor and pipeline parallelism, whatever it runs on. Each
// case is called on every rank, and what it finds on one is a failure of all.
#pragma once

#include <gtest/gtest.h>

#include "ranks/collective_decorators.h"
#include "ranks/guarded_ranks.h"
#include "ranks/model_parallel.h"

namespace holdfast::model_parallel {

inline constexpr std::uint64_t kAttempts = 5;
inline constexpr std::uint64_t kBad = 2;  // the attempt that goes wrong
inline constexpr Where kNonFinite[] = {Where::kInput,     Where::kForward, Where::kBackward,
                                       Where::kReduction, Where::kReduced, Where::kUpdate};

inline GuardOptions options_of(Place place, const std::string& policy, const std::string& run_dir = "") {
  GuardOptions options = guard_options(policy, place.rank == 0 ? run_dir : "");
  options.axes = place.axes();
  return options;
}

// Collective.
inline void expect_the_same_on_all(Collective& collective, const std::string& mine, const std::string& what) {
  std::vector<Bytes> all;
  ASSERT_TRUE(collective.gather(mine, &all).ok());
  for (std::size_t r = 1; r < all.size(); ++r)
    EXPECT_EQ(all[r], all[0]) << what << ": rank " << r << " against rank 0";
}

inline std::string told(const Decision& decision) {
  return std::string(action_name(decision.action)) + " " + std::to_string(decision.exit_code()) + " " +
         decision.reason;
}

// One rank's course through a run.
struct Course {
  std::vector<Decision> decisions;
  std::vector<std::string> states;       // after each attempt
  std::vector<std::string> collectives;  // the guard's, of each attempt
  std::vector<std::string> trainers;     // the trainer's
  std::string told_all() const {
    std::string text;
    for (const Decision& decision : decisions) text += told(decision) + "\n";
    return text;
  }
};

struct Setting {
  std::string policy = "check_update: BEFORE max_total_skips: 1000 max_consecutive_skips: 1000";
  bool sharded = false;
  std::optional<Fault> fault = {};
  std::optional<std::uint64_t> omitted = {};
};

// Stops where the run ends.
inline Course train(Collective& collective, Fabric& wires, const Setting& setting) {
  const Place place{collective.rank()};
  RecordingCollective recording(collective);
  RecordingFabric fabric(wires);
  Trainer trainer(place, fabric, setting.sharded);
  trainer.fault = setting.fault;
  const auto guard = create_guard(recording, options_of(place, setting.policy));
  Course course;
  if (!guard) return course;
  EXPECT_TRUE(guard->agree_on_layout(trainer.layout()).ok());
  for (std::uint64_t data = 0; data < kAttempts; ++data) {
    if (data == setting.omitted) continue;
    recording.calls.clear();
    fabric.calls.clear();
    course.decisions.push_back(trainer.attempt(*guard, data));
    if (!course.decisions.back().ends_run()) guard->finish();
    course.states.push_back(trainer.state());
    course.collectives.push_back(recording.calls);
    course.trainers.push_back(fabric.calls);
    if (course.decisions.back().ends_run()) break;
  }
  return course;
}

inline std::string name_of(const Fault& fault) {
  return "fault " + std::to_string(static_cast<int>(fault.where)) + " of value " +
         std::to_string(fault.value) + " on rank " + std::to_string(fault.rank);
}

// All eight skip together, nothing that training depends on has changed, and it ends as if that attempt had
// not been.
inline void expect_skipped_together(Collective& collective, Fabric& fabric, const Setting& setting,
                                    const Course& reference) {
  const Fault& fault = *setting.fault;
  const std::string what = name_of(fault);
  const Course course = train(collective, fabric, setting);
  ASSERT_EQ(course.decisions.size(), kAttempts) << what << "\n" << course.told_all();
  for (std::uint64_t a = 0; a < kAttempts; ++a) {
    const Action expected = a == kBad ? Action::kSkip : Action::kApply;
    EXPECT_EQ(action_name(course.decisions[a].action), action_name(expected)) << what << ", attempt " << a;
    EXPECT_EQ(course.collectives[a], a == kBad ? "RGB" : "R") << what << ", attempt " << a;
  }
  expect_the_same_on_all(collective, course.told_all(), what);
  EXPECT_EQ(course.states[kBad], course.states[kBad - 1]) << what;
  EXPECT_NE(course.states[kBad + 1], course.states[kBad]) << what;
  EXPECT_EQ(course.states.back(), reference.states.back()) << what;
  std::string expected = course.trainers[kBad - 1];
  if (setting.sharded) expected.pop_back();  // parameters are gathered after an update only
  EXPECT_EQ(course.trainers[kBad], expected) << what;
  // The first finding is of the rank itself: an earlier rank than its own has none. In the sum it is of the
  // share.
  const std::string& reason = course.decisions[kBad].reason;
  const int first =
      fault.where == Where::kReduction ? std::min(fault.rank, Place{fault.rank}.replica()) : fault.rank;
  EXPECT_NE(reason.find("on rank " + std::to_string(first) + " (host"), std::string::npos)
      << what << ": " << reason;
}

inline void any_rank_non_finite_anywhere_skips_on_all_eight(Collective& collective, Fabric& fabric,
                                                            bool sharded) {
  Setting setting{.sharded = sharded, .omitted = kBad};
  const Course reference = train(collective, fabric, setting);
  ASSERT_EQ(reference.states.size(), kAttempts - 1);
  setting.omitted.reset();
  int turn = 0;
  for (int rank = 0; rank < kRanks; ++rank) {
    for (const Where where : kNonFinite) {
      const float value = std::array{kNanF, kInfF, -kInfF}[static_cast<std::size_t>(turn++ % 3)];
      setting.fault = Fault{kBad, rank, where, value};
      expect_skipped_together(collective, fabric, setting, reference);
    }
  }
}

// The other ranks wait for it in the pipeline, in its half and in its replica: nobody may be left there.
inline void an_exception_on_any_rank_ends_all_eight_with_80(Collective& collective, Fabric& fabric) {
  for (int rank = 0; rank < kRanks; ++rank) {
    for (const Where where : {Where::kThrowForward, Where::kThrowBackward}) {
      const Fault fault{kBad, rank, where, 0};
      const Course course = train(collective, fabric, {.fault = fault});
      ASSERT_EQ(course.decisions.size(), kBad + 1) << name_of(fault);
      const Decision& last = course.decisions.back();
      EXPECT_EQ(last.exit_code(), 80) << name_of(fault);
      EXPECT_NE(last.reason.find("exception on rank " + std::to_string(rank) + " "), std::string::npos)
          << last.reason;
      EXPECT_EQ(course.states[kBad], course.states[kBad - 1]) << name_of(fault);
      EXPECT_EQ(course.trainers[kBad], course.trainers[kBad - 1]) << name_of(fault);
      expect_the_same_on_all(collective, course.told_all(), name_of(fault));
    }
  }
}

inline void an_exception_on_any_rank_is_skipped_when_the_policy_says_so(Collective& collective,
                                                                        Fabric& fabric) {
  Setting setting{.policy = "check_update: BEFORE on_error: SKIP", .omitted = kBad};
  const Course reference = train(collective, fabric, setting);
  setting.omitted.reset();
  for (int rank = 0; rank < kRanks; ++rank) {
    setting.fault = Fault{kBad, rank, rank % 2 == 0 ? Where::kThrowForward : Where::kThrowBackward, 0};
    expect_skipped_together(collective, fabric, setting, reference);
  }
}

// One bit of the parameters of one rank, between two attempts.
inline void a_bit_flip_on_any_rank_is_found_in_its_group(Collective& collective, Fabric& fabric) {
  for (int rank = 0; rank < kRanks; ++rank) {
    const Place place{collective.rank()};
    Trainer trainer(place, fabric, false);
    const auto guard = create_guard(collective, options_of(place, "proof_interval_attempts: 1"));
    ASSERT_TRUE(guard->register_state(trainer.registered()).ok());
    std::string course;
    for (std::uint64_t data = 0; data < kAttempts; ++data) {
      if (data == kBad && place.rank == rank) trainer.parameters()[Trainer::kLayer + 3] *= -1;  // its sign
      const Decision decision = trainer.attempt(*guard, data);
      course += told(decision) + "\n";
      if (decision.ends_run()) break;
      guard->finish();
    }
    const Place odd{rank % 4};  // of the two replicas nobody knows which is right
    const std::string head = "APPLY 0 \nAPPLY 0 \nABORT 83 replicas differ in " + odd.group() + ": rank " +
                             std::to_string(odd.rank) + " (host ";
    EXPECT_TRUE(course.starts_with(head)) << course;
    EXPECT_NE(course.find(", rank " + std::to_string(odd.replica()) + " (host "), std::string::npos)
        << course;
    const std::string tensor = "stage" + std::to_string(odd.pp) + ".half" + std::to_string(odd.tp) + ".row\n";
    EXPECT_TRUE(course.ends_with(" against each other, first in " + tensor)) << course;
    expect_the_same_on_all(collective, course, "bit flip on rank " + std::to_string(rank));
  }
}

inline void a_layout_that_differs_within_a_group_is_named(Collective& collective, Fabric& fabric) {
  for (int rank = 0; rank < kRanks; ++rank) {
    const Place place{collective.rank()};
    Trainer trainer(place, fabric, false);
    const auto guard = create_guard(collective, options_of(place, ""));
    std::vector<BucketSlice> layout = trainer.layout();
    if (place.rank == rank) --layout.back().count;
    const Status status = guard->agree_on_layout(layout);
    EXPECT_EQ(status.exit_code(), 83);
    const Place odd{rank % 4};
    const std::string one =
        "rank " + std::to_string(odd.rank) + " against rank " + std::to_string(odd.replica());
    const std::string other =
        "rank " + std::to_string(odd.replica()) + " against rank " + std::to_string(odd.rank);
    const std::string group = " (replica group " + odd.group() + ")";
    const std::string head = "rank 0: ranks hold different tensors: ";
    EXPECT_TRUE(status.message() == head + one + group || status.message() == head + other + group)
        << status.message();
  }
}

// Written into the moments of one rank's shard, where no other rank can see it: all go back together, and
// make the attempts again.
inline void moments_spoilt_in_one_shard_make_all_eight_go_back(
    Collective& collective, Fabric& fabric, const std::function<std::string(int)>& run_dir) {
  Setting calm{.sharded = true};
  const Course reference = train(collective, fabric, calm);
  for (int rank = 0; rank < kRanks; ++rank) {
    const Place place{collective.rank()};
    Trainer trainer(place, fabric, true);
    trainer.fault = Fault{kBad, rank, Where::kUpdate, rank % 2 == 0 ? kNanF : kInfF};
    GuardOptions options = options_of(place, "check_update: AFTER", run_dir(rank));
    options.checkpoints.interval_attempts = 1;
    const auto guard = create_guard(collective, options);
    const Status registered = guard->register_state(trainer.registered());
    ASSERT_TRUE(registered.ok()) << registered.to_string();
    std::string course;
    for (int calls = 0; guard->attempt() < kAttempts && calls < 20; ++calls) {
      const std::uint64_t data = guard->attempt();
      const Decision decision = trainer.attempt(*guard, data);
      course += told(decision) + "\n";
      ASSERT_FALSE(decision.ends_run()) << course;
      if (!decision.rolls_back()) {
        guard->finish();
        continue;
      }
      EXPECT_EQ(data, kBad + 1) << course;
      EXPECT_NE(decision.reason.find("on rank " + std::to_string(rank) + " "), std::string::npos)
          << decision.reason;
      EXPECT_FALSE(guard->roll_back().ends_run());
      trainer.fault.reset();  // the second time it goes well
    }
    EXPECT_EQ(guard->epoch(), 2u) << course;
    EXPECT_EQ(trainer.state(), reference.states.back()) << course;
    EXPECT_TRUE(guard->close().apply());
    expect_the_same_on_all(collective, course, "shard of rank " + std::to_string(rank));
  }
}

}  // namespace holdfast::model_parallel
