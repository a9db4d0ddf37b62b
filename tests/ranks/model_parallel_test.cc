// Data, tensor and pipeline parallelism: one guard over all ranks, replicas compared within their group.
#include <gtest/gtest.h>

#include <barrier>

#include "coord/temp_dir.h"
#include "count_allocations.h"
#include "ranks/model_parallel_cases.h"
#include "ranks/thread_fabric.h"

namespace holdfast::model_parallel {
namespace {

void on_each_rank(const std::function<void(Collective&, Fabric&)>& body) {
  Mailboxes boxes;
  ThreadGroup(kRanks).run([&](Collective& collective) {
    ThreadFabric fabric(boxes, Place{collective.rank()});
    body(collective, fabric);
  });
}

TEST(ModelParallel, AnyRankNonFiniteAnywhereSkipsOnAllEight) {
  on_each_rank(
      [](Collective& c, Fabric& f) { any_rank_non_finite_anywhere_skips_on_all_eight(c, f, false); });
}
TEST(ModelParallel, WithAShardedOptimizerToo) {
  on_each_rank([](Collective& c, Fabric& f) { any_rank_non_finite_anywhere_skips_on_all_eight(c, f, true); });
}
TEST(ModelParallel, AnExceptionOnAnyRankEndsAllEightWith80) {
  on_each_rank(an_exception_on_any_rank_ends_all_eight_with_80);
}
TEST(ModelParallel, AnExceptionOnAnyRankIsSkippedWhenThePolicySaysSo) {
  on_each_rank(an_exception_on_any_rank_is_skipped_when_the_policy_says_so);
}
TEST(ModelParallel, ABitFlipOnAnyRankIsFoundInItsGroup) {
  on_each_rank(a_bit_flip_on_any_rank_is_found_in_its_group);
}
TEST(ModelParallel, ALayoutThatDiffersWithinAGroupIsNamed) {
  on_each_rank(a_layout_that_differs_within_a_group_is_named);
}
TEST(ModelParallel, MomentsSpoiltInOneShardMakeAllEightGoBack) {
  const TempDir temp;
  on_each_rank([&](Collective& c, Fabric& f) {
    moments_spoilt_in_one_shard_make_all_eight_go_back(c, f,
                                                       [&](int rank) { return temp / std::to_string(rank); });
  });
}

// ---- groups of any shape, with a state of one tensor

struct Member {
  std::map<std::string, int> axes;
  std::optional<int> group;
  std::string holds;  // the tensor's bytes
};

// One attempt with a proof, of ranks that hold this.
Decision prove(const std::vector<Member>& members) {
  Decisions decisions(static_cast<int>(members.size()));
  ThreadGroup(static_cast<int>(members.size())).run([&](Collective& collective) {
    Member member = members[static_cast<std::size_t>(collective.rank())];
    GuardOptions options = guard_options();
    options.axes = member.axes;
    options.replica_group = member.group;
    const auto guard = create_guard(collective, options);
    TrainingState state;
    state.add(StateTensor{.name = "layer of " + member.holds.substr(0, 1),
                          .data = member.holds.data(),
                          .dtype = DType::kUInt8,
                          .shape = {std::ssize(member.holds)}});
    ASSERT_TRUE(guard->register_state(std::move(state)).ok());
    decisions.add(collective.rank(), attempt(*guard, [] {}));
  });
  return decisions.agreed().at(0);
}

TEST(ReplicaGroups, OfThreeReplicasTheMinorityIsNamedAndTheTensorIsItsGroups) {
  for (int odd = 0; odd < 6; ++odd) {
    std::vector<Member> members;
    for (int r = 0; r < 6; ++r) {
      members.push_back({{{"dp", r / 2}, {"tp", r % 2}}, {}, r % 2 == 0 ? "even" : "odd half"});
    }
    EXPECT_TRUE(prove(members).apply());
    members[static_cast<std::size_t>(odd)].holds[2] = '?';
    const Decision decision = prove(members);
    EXPECT_EQ(decision.exit_code(), 83);
    const std::string group = odd % 2 == 0 ? "tp=0" : "tp=1";
    EXPECT_TRUE(decision.reason.starts_with("replicas differ in " + group + ": rank " + std::to_string(odd) +
                                            " (host "))
        << decision.reason;
    EXPECT_TRUE(decision.reason.ends_with(std::string(" against the other 2, first in layer of ") +
                                          (odd % 2 == 0 ? "e" : "o")))
        << decision.reason;
  }
}

TEST(ReplicaGroups, EachGroupThatDiffersIsNamed) {
  const Decision decision = prove({{{{"dp", 0}, {"tp", 0}}, {}, "aa"},
                                   {{{"dp", 0}, {"tp", 1}}, {}, "bb"},
                                   {{{"dp", 1}, {"tp", 0}}, {}, "ab"},
                                   {{{"dp", 1}, {"tp", 1}}, {}, "ba"}});
  EXPECT_NE(decision.reason.find("replicas differ in tp=0: rank 0 "), std::string::npos) << decision.reason;
  EXPECT_NE(decision.reason.find("; and in tp=1: rank 1 "), std::string::npos) << decision.reason;
}

// A replica whose ranks are numbered in another order holds the halves exchanged: what one group misses the
// other has.
TEST(ReplicaGroups, HalvesThatAreExchangedInOneReplicaDoNotCancel) {
  const Decision decision = prove({{{{"dp", 0}, {"tp", 0}}, {}, "upper"},
                                   {{{"dp", 0}, {"tp", 1}}, {}, "lower"},
                                   {{{"dp", 1}, {"tp", 0}}, {}, "lower"},
                                   {{{"dp", 1}, {"tp", 1}}, {}, "upper"}});
  EXPECT_EQ(decision.exit_code(), 83);
}

TEST(ReplicaGroups, MayHaveAnySizeAndOneRankHasNothingToCompareWith) {
  const auto groups = [](int last_of_0) {
    std::vector<Member> members;
    for (const int group : {7, 7, 7, -1, -1, 4}) {
      members.push_back({{}, group, std::string(3, static_cast<char>('h' + group))});
    }
    members[5].holds = "whatever it is";
    members[2].holds[1] = static_cast<char>(members[2].holds[1] + last_of_0);
    return members;
  };
  EXPECT_TRUE(prove(groups(0)).apply());
  const Decision decision = prove(groups(1));
  EXPECT_EQ(decision.exit_code(), 83);
  EXPECT_TRUE(decision.reason.starts_with("replicas differ in 7: rank 2 (host ")) << decision.reason;
  EXPECT_NE(decision.reason.find(" against the other 2, first in layer of o"), std::string::npos)
      << decision.reason;
}

TEST(ReplicaGroups, ANumberOverrulesTheTags) {
  const auto members = [](std::optional<int> group) {
    std::vector<Member> two;
    for (int r = 0; r < 2; ++r) two.push_back({{{"dp", 0}, {"cp", r}}, group, r == 0 ? "same" : "sane"});
    return two;
  };
  EXPECT_TRUE(prove(members({})).apply());  // as the tags say, each is alone
  EXPECT_EQ(prove(members(0)).exit_code(), 83);
}

TEST(ReplicaGroups, RanksThatDifferInDpAloneAreAllReplicas) {
  std::vector<Member> members;
  for (int r = 0; r < 3; ++r) members.push_back({{{"dp", r}}, {}, "same"});
  EXPECT_TRUE(prove(members).apply());
  members[1].holds = "sane";
  EXPECT_TRUE(prove(members).reason.starts_with("replicas differ: rank 1 (host ")) << prove(members).reason;
}

// ---- what proofs leave behind, and what they cost

// On each rank of two groups of two: a guard that keeps its record in `run_dir`, and memory of this many
// bytes, a tensor each.
void in_two_groups(const std::string& policy, const std::string& run_dir, std::size_t tensors,
                   const std::function<void(StepGuard&, int rank, std::string& memory)>& body) {
  ThreadGroup(4, std::chrono::seconds(20)).run([&](Collective& collective) {
    GuardOptions options = guard_options(policy, run_dir);
    options.replica_group = collective.rank() % 2;
    const auto guard = create_guard(collective, options);
    std::string memory(tensors, 'x');
    TrainingState state;
    for (std::size_t t = 0; t < tensors; ++t) {
      state.add(StateTensor{.name = "a tensor with a long name and number " + std::to_string(t),
                            .data = &memory[t],
                            .dtype = DType::kUInt8,
                            .shape = {1}});
    }
    EXPECT_TRUE(guard->register_state(std::move(state)).ok());
    body(*guard, collective.rank(), memory);
  });
}

std::string proofs_counted(const std::string& run_dir) {
  const std::string name = "\nholdfast_replica_proofs_total ";
  const std::string text = read_file(run_dir + "/metrics.prom");
  const std::size_t at = text.find(name);
  if (at == std::string::npos) return "none";
  return text.substr(at + name.size(), text.find('\n', at + 1) - at - name.size());
}

TEST(ReplicaProofs, AreCountedWhenAllAgreeInAttemptsThatAreAppliedOrSkippedAndNotWhenOneDiffers) {
  const TempDir temp;
  in_two_groups(
      "proof_interval_attempts: 3", temp / "run", 2, [](StepGuard& guard, int rank, std::string& memory) {
        // A proof in 0 and 3 by the interval, and in 4 after the skip.
        for (int i = 0; i < 6; ++i) {
          const bool bad = i == 3 && rank == 1;
          const Decision decision =
              attempt(guard, [&] { observe_values(guard, Stage::kBackward, "w", {bad ? kNanF : 1.0f}); });
          EXPECT_EQ(decision.action, i == 3 ? Action::kSkip : Action::kApply);
        }
        if (rank == 3) memory[1] = 'y';
        EXPECT_EQ(attempt(guard, [] {}).exit_code(), 83);
      });
  EXPECT_EQ(proofs_counted(temp / "run"), "3");
}

TEST(ReplicaProofs, AreCountedAtTheEndOfTheRunToo) {
  const TempDir temp;
  in_two_groups("proof_interval_attempts: 3", temp / "run", 1, [](StepGuard& guard, int, std::string&) {
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(attempt(guard, [] {}).apply());
    EXPECT_TRUE(guard.close().apply());
  });
  EXPECT_EQ(proofs_counted(temp / "run"), "2");
}

// Of clean attempts, each with a proof, on four ranks.
long allocations_of_proofs(std::size_t tensors) {
  std::atomic<long> made = 0;
  std::barrier all(4);
  in_two_groups("proof_interval_attempts: 1", "", tensors, [&](StepGuard& guard, int rank, std::string&) {
    for (int i = 0; i < 10; ++i) attempt(guard, [] {});
    all.arrive_and_wait();
    if (rank == 0) made -= g_allocations;
    all.arrive_and_wait();
    for (int i = 0; i < 64; ++i) attempt(guard, [] {});
    all.arrive_and_wait();
    if (rank == 0) made += g_allocations;
    all.arrive_and_wait();
  });
  return made;
}

TEST(ReplicaProofs, OfManyTensorsAllocateNoMoreThanOfOneWhileReplicasAgree) {
  EXPECT_EQ(allocations_of_proofs(300), allocations_of_proofs(1));
}

TEST(ReplicaGroups, ARankThatForgetsATagIsRefusedOnEveryRank) {
  for (const bool forgets_number : {false, true}) {
    ThreadGroup(3).run([&](Collective& collective) {
      const bool odd = collective.rank() == 1;
      GuardOptions options = guard_options();
      options.axes = {{"dp", collective.rank()}, {"tp", 0}};
      if (forgets_number && !odd) options.replica_group = 0;
      if (!forgets_number && odd) options.axes.erase("tp");
      std::unique_ptr<StepGuard> guard;
      const Status status = StepGuard::create(collective, options, &guard);
      EXPECT_EQ(status.exit_code(), 83);
      const std::string said = forgets_number ? "rank 1 names the axes dp,tp and rank 0 a replica group: "
                                              : "rank 1 names the axes dp and rank 0 the axes dp,tp: ";
      EXPECT_NE(status.message().find(said), std::string::npos) << status.message();
    });
  }
}

// Each element of a reduced gradient is scanned by one rank of its group.
TEST(ReplicaGroups, EachGroupSharesItsOwnGradientAmongItself) {
  const BucketSlice layout{"w", 0, 11};
  std::array<std::atomic<int>, 2> scanned{};
  ThreadGroup(6).run([&](Collective& collective) {
    GuardOptions options = guard_options();
    options.axes = {{"dp", collective.rank() / 2}, {"tp", collective.rank() % 2}};
    const auto guard = create_guard(collective, options);
    for (const SharePiece& piece : guard->share({&layout, 1})) {
      for (std::int64_t i = 0; i < piece.count; ++i) {
        scanned[static_cast<std::size_t>(collective.rank() % 2)] += 1 << (2 * (piece.begin + i));
      }
    }
  });
  for (const auto& times : scanned) EXPECT_EQ(times, 0b0101010101010101010101);
}

}  // namespace
}  // namespace holdfast::model_parallel
