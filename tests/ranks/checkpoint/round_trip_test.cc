#include <limits>

#include "store_world.h"

namespace holdfast {
namespace {

class RoundTrip : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, RoundTrip, testing::Values(1, 2, 4),
                         [](const auto& ranks) { return "np" + std::to_string(ranks.param); });

TEST_P(RoundTrip, EveryKindOfStateComesBackBitForBit) {
  MemoryDir dir;
  const World world = {.folder = dir / "checkpoints", .ranks = GetParam(), .declare = all_kinds};
  world.run([](Rank& rank) {
    const CheckpointOutcome outcome = rank.publish(37);
    if (rank.is_first()) {
      EXPECT_TRUE(outcome.published) << outcome.reason;
      EXPECT_EQ(outcome.reason, "");
      EXPECT_EQ(outcome.id.name(), "e0001-a0000000037");
      EXPECT_GT(outcome.bytes, 0u);
      EXPECT_GT(outcome.seconds, 0.0);
      EXPECT_EQ(names_of(rank.store->generations()), std::vector<std::string>{"e0001-a0000000037"});
    }
  });
  std::vector<std::string> wanted = {"manifest.pb"};
  for (int r = 0; r < GetParam(); ++r) wanted.push_back("rank-0000" + std::to_string(r) + ".safetensors");
  wanted.push_back("replicated.safetensors");
  EXPECT_EQ(names_in(dir / "checkpoints/e0001-a0000000037"), wanted);
  EXPECT_EQ(names_in(dir / "checkpoints"), std::vector<std::string>{"e0001-a0000000037"});
  world.run([&](Rank& rank) {
    const RestoredGeneration restored = rank.expect_restored(37);
    EXPECT_EQ(restored.ranks, static_cast<std::uint64_t>(GetParam()));
    EXPECT_EQ(restored.refused, std::vector<std::string>{});
  });
}

TEST_P(RoundTrip, TheNewestIsRestoredUnlessItIsRuledOut) {
  MemoryDir dir;
  const World world = {.folder = dir / "checkpoints", .ranks = GetParam()};
  world.run([](Rank& rank) {
    rank.publish(10);
    rank.publish(20);
    rank.publish(15, 2);  // after a rollback
  });
  world.run([](Rank& rank) {
    rank.expect_restored(15, 2);
    RestoredGeneration restored;
    // Rank 0's word counts.
    const GenerationId at_most = rank.is_first() ? GenerationId{1, 19} : GenerationId{9, 9};
    ASSERT_TRUE(rank.store->restore(&restored, at_most).ok());
    EXPECT_EQ(restored.position.attempt, 10u);
    EXPECT_EQ(rank.state.values(), rank.state.expected(10));
  });
}

TEST(CheckpointStore, TheCopyIsAsOfSaveWhateverTheTrainerDoesMeanwhile) {
  MemoryDir dir;
  const World world = {.folder = dir / "checkpoints", .ranks = 2, .declare = all_kinds};
  world.run([](Rank& rank) {
    for (const std::uint64_t attempt : {5u, 6u, 7u}) {
      rank.state.fill(attempt);
      rank.begin(attempt);
      EXPECT_TRUE(rank.store->in_flight());
      EXPECT_EQ(rank.store->flight(), (GenerationId{1, attempt}));
      rank.state.scribble();
      rank.finish();
      EXPECT_FALSE(rank.store->in_flight());
      EXPECT_FALSE(rank.store->part_done());
      rank.expect_restored(attempt);
    }
  });
}

TEST(CheckpointStore, PublicationRunsWhileTheNextStepIsSaved) {
  MemoryDir dir;
  const World world = {
      .folder = dir / "checkpoints", .ranks = 3, .options = {.interval_attempts = 1, .keep = 2}};
  world.run([](Rank& rank) {
    for (std::uint64_t attempt = 1; attempt <= 20; ++attempt) {
      rank.state.fill(attempt);
      rank.begin(attempt);
      ASSERT_TRUE(rank.store->complete().ok());
    }
    rank.store->wait();
    const std::vector<CheckpointOutcome> outcomes = rank.store->take_outcomes();
    if (rank.is_first()) {
      ASSERT_EQ(outcomes.size(), 20u);
      for (std::size_t i = 0; i < outcomes.size(); ++i) {
        EXPECT_TRUE(outcomes[i].published) << outcomes[i].reason;
        EXPECT_EQ(outcomes[i].id.attempt, i + 1);
        EXPECT_EQ(outcomes[i].removed.size(), i < 2 ? 0u : 1u);
      }
    }
    rank.expect_restored(20);
  });
}

TEST(CheckpointStore, ARankWithNothingToWriteIsDoneAtOnce) {
  MemoryDir dir;
  World world = {.folder = dir / "checkpoints", .ranks = 3};
  world.declare = [](RankState& state) { state.add("weight", DType::kFloat32, {4}, Held::kReplicated); };
  world.run([](Rank& rank) {
    rank.state.fill(1);
    rank.begin(1);
    const bool done = rank.store->part_done();
    EXPECT_TRUE(done || rank.is_first());
    const CheckpointOutcome outcome = rank.finish();
    EXPECT_EQ(outcome.published, rank.is_first()) << outcome.reason;
    rank.expect_restored(1);
  });
  EXPECT_EQ(names_in(dir / "checkpoints/e0001-a0000000001"),
            (std::vector<std::string>{"manifest.pb", "replicated.safetensors"}));
}

TEST(CheckpointStore, WhatMayBeNonFiniteComesBackAsItIs) {
  MemoryDir dir;
  World world = {.folder = dir / "checkpoints"};
  world.declare = [](RankState& state) {
    StateTensor mask;
    mask.name = "mask";
    mask.shape = {2};
    mask.must_be_finite = false;
    state.add_tensor(mask);
  };
  world.run([](Rank& rank) {
    rank.state.fill(1);
    rank.state.set("mask", 1, -std::numeric_limits<float>::infinity());
    const auto saved = rank.state.values();
    rank.begin(1);
    EXPECT_TRUE(rank.finish().published);
    RestoredGeneration restored;
    rank.state.scribble();
    ASSERT_TRUE(rank.store->restore(&restored).ok());
    EXPECT_EQ(rank.state.values(), saved);
  });
}

// Nothing that is not finite gets into a state that must be, even if it was saved under another rule.
TEST(CheckpointStore, AStricterRuleIsAppliedAtARestore) {
  MemoryDir dir;
  const auto declare = [](bool must_be_finite) {
    return [must_be_finite](RankState& state) {
      StateTensor tensor;
      tensor.name = "values";
      tensor.shape = {2};
      tensor.must_be_finite = must_be_finite;
      state.add_tensor(tensor);
    };
  };
  World world = {.folder = dir / "checkpoints", .declare = declare(false)};
  world.run([](Rank& rank) {
    rank.publish(1);
    rank.state.fill(2);
    rank.state.set("values", 0, std::numeric_limits<float>::quiet_NaN());
    rank.begin(2);
    EXPECT_TRUE(rank.finish().published);
  });
  world.declare = declare(true);
  world.run([](Rank& rank) {
    const RestoredGeneration restored = rank.expect_restored(1);
    EXPECT_EQ(restored.refused,
              std::vector<std::string>{
                  "e0001-a0000000002 passed over: rank 0: values holds what is not finite, and must "
                  "not in this run (rank 0 finds it clean, so it stays)"});
  });
}

}  // namespace
}  // namespace holdfast
