#include <atomic>
#include <limits>
#include <thread>

#include "forwarding_file_system.h"
#include "store_world.h"

namespace holdfast {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

using Names = std::vector<std::string>;

class Refusal : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(OnRank, Refusal, testing::Range(0, 4));

TEST_P(Refusal, ANonFiniteValueOnAnyRankIsNamedAndLeavesNothing) {
  MemoryDir dir;
  const World world = {.folder = dir / "checkpoints", .ranks = 4};
  world.run([](Rank& rank) {
    rank.publish(10);
    rank.state.fill(20);
    if (rank.number() == GetParam()) rank.state.set("own", 2, -kInf);
    rank.begin(20);
    const CheckpointOutcome outcome = rank.finish();
    if (rank.is_first()) {
      EXPECT_FALSE(outcome.published);
      EXPECT_TRUE(outcome.non_finite);
      EXPECT_EQ(outcome.reason,
                "e0001-a0000000020 refused: own[2] is -Inf on rank " + std::to_string(GetParam()));
      EXPECT_EQ(names_of(rank.store->generations()), Names{"e0001-a0000000010"});
    }
    rank.expect_restored(10);
  });
  EXPECT_EQ(names_in(dir / "checkpoints"), Names{"e0001-a0000000010"});
}

TEST_P(Refusal, AnExceptionOfASaveCallbackIsAFailedPart) {
  const int bad = GetParam();
  MemoryDir dir;
  World world = {.folder = dir / "checkpoints", .ranks = 4};
  std::vector<char> broken(4, 0);  // by rank
  world.declare = [&](RankState& state) {
    small_model(state);
    char& broken_here = broken[static_cast<std::size_t>(state.rank())];
    StateBytes cursor;
    cursor.name = "cursor";
    cursor.held = Held::kPerRank;
    cursor.save = [&broken_here]() -> Bytes {
      if (broken_here != 0) throw std::runtime_error("no more\nsamples");
      return "at 7";
    };
    cursor.load = [](const Bytes& bytes) {
      return bytes == "at 7" ? Status() : Status::internal("not mine");
    };
    state.state().add(cursor);
  };
  world.run([&](Rank& rank) {
    rank.publish(10);
    rank.state.fill(20);
    char& broken_here = broken[static_cast<std::size_t>(rank.number())];
    broken_here = rank.number() == bad;
    rank.begin(20);
    const CheckpointOutcome outcome = rank.finish();
    if (rank.is_first()) {
      EXPECT_FALSE(outcome.published);
      EXPECT_FALSE(outcome.non_finite);
      EXPECT_EQ(outcome.reason, "e0001-a0000000020 refused: rank " + std::to_string(bad) +
                                    ": saving cursor failed: no more\\x0asamples");
    }
    rank.expect_restored(10);
    broken_here = 0;
    EXPECT_EQ(rank.publish(30).published, rank.is_first());
  });
  EXPECT_EQ(names_in(dir / "checkpoints"), (Names{"e0001-a0000000010", "e0001-a0000000030"}));
}

// Large parts are looked through on a thread beside the one that writes them.
TEST(CheckpointRefusal, TheLastValueOfALargePartIsNamedToo) {
  MemoryDir dir;
  World world = {.folder = dir / "checkpoints", .ranks = 2};
  constexpr std::int64_t kElements = 1'000'003;
  world.declare = [](RankState& state) {
    state.add("first", DType::kFloat32, {kElements}, Held::kPerRank);
    state.add("last", DType::kFloat32, {kElements}, Held::kPerRank);
  };
  world.run([](Rank& rank) {
    EXPECT_EQ(rank.publish(1).published, rank.is_first());
    rank.state.fill(2);
    if (rank.number() == 1) rank.state.set("last", kElements - 1, kInf);
    rank.begin(2);
    const CheckpointOutcome outcome = rank.finish();
    EXPECT_EQ(outcome.non_finite, rank.is_first());
    EXPECT_EQ(outcome.reason,
              rank.is_first() ? "e0001-a0000000002 refused: last[1000002] is +Inf on rank 1" : "");
    rank.expect_restored(1);
  });
  EXPECT_EQ(names_in(dir / "checkpoints"), Names{"e0001-a0000000001"});
}

// Field case 24: what is refused does not count, and nothing healthy goes for it.
TEST(Case24RetentionEvictsTheHealthy, FourRefusedOnesLeaveTheThreeGoodOnes) {
  MemoryDir dir;
  const World world = {
      .folder = dir / "checkpoints", .ranks = 4, .options = {.interval_attempts = 1, .keep = 3}};
  world.run([](Rank& rank) {
    for (std::uint64_t attempt = 1; attempt <= 3; ++attempt) rank.publish(attempt);
    for (std::uint64_t attempt = 4; attempt <= 7; ++attempt) {
      rank.state.fill(attempt);
      const std::string bad = attempt % 2 == 0 ? "weight" : "moment";
      rank.state.set(bad, attempt - 4, kNan);
      rank.begin(attempt);
      const CheckpointOutcome outcome = rank.finish();
      if (!rank.is_first()) continue;
      EXPECT_FALSE(outcome.published);
      EXPECT_EQ(outcome.reason, "e0001-a000000000" + std::to_string(attempt) + " refused: " + bad + "[" +
                                    std::to_string(attempt - 4) + "] is NaN on rank 0");
      EXPECT_EQ(outcome.removed, Names{});
    }
    rank.expect_restored(3);
  });
  EXPECT_EQ(names_in(dir / "checkpoints"),
            (Names{"e0001-a0000000001", "e0001-a0000000002", "e0001-a0000000003"}));
}

TEST(CheckpointRefusal, RanksAtDifferentAttemptsPublishNothing) {
  MemoryDir dir;
  const World world = {.folder = dir / "checkpoints", .ranks = 3};
  world.run([](Rank& rank) {
    rank.state.fill(1);
    rank.begin(rank.number() == 2 ? 8 : 7);
    const CheckpointOutcome outcome = rank.finish();
    if (rank.is_first()) {
      EXPECT_FALSE(outcome.published);
      EXPECT_EQ(outcome.reason,
                "e0001-a0000000007 refused: rank 2: it is at e0001-a0000000008 where rank 0 is at "
                "e0001-a0000000007");
    }
  });
  world.run([](Rank&) {});  // removes what rank 2 has begun
  EXPECT_EQ(names_in(dir / "checkpoints"), Names{});
}

// As when the folder is, behind the same name, another on each host.
TEST(CheckpointRefusal, APartThatRankZeroDoesNotSeeIsMissed) {
  MemoryDir dir;
  HidingFileSystem blind({"rank-00002.safetensors"});
  World world = {.folder = dir / "checkpoints", .ranks = 3};
  world.files = [&](int rank) -> FileSystem& { return rank == 0 ? blind : real_file_system(); };
  world.run([](Rank& rank) {
    const CheckpointOutcome outcome = rank.publish(1);
    if (!rank.is_first()) return;
    EXPECT_FALSE(outcome.published);
    EXPECT_TRUE(outcome.reason.ends_with("is the folder on a file system that all hosts share?"))
        << outcome.reason;
  });
  for (const std::string& name : names_in(world.folder)) EXPECT_TRUE(name.ends_with(".partial")) << name;
}

TEST(CheckpointRefusal, AGenerationThatIsThereAlreadyIsLeftAlone) {
  MemoryDir dir;
  const World world = {.folder = dir / "checkpoints", .ranks = 2};
  world.run([](Rank& rank) {
    rank.publish(5);
    rank.wait_for_all();  // while rank 0 publishes, the others would find the partial folder still there
    rank.state.fill(6);
    rank.begin(5);
    const CheckpointOutcome outcome = rank.finish();
    if (rank.is_first()) {
      EXPECT_FALSE(outcome.published);
      EXPECT_NE(outcome.reason.find("it is there already"), std::string::npos) << outcome.reason;
    }
    rank.expect_restored(5);
  });
  EXPECT_EQ(names_in(dir / "checkpoints"), Names{"e0001-a0000000005"});
}

TEST(CheckpointAbandon, WhatIsAbandonedIsRemovedAndSaid) {
  MemoryDir dir;
  const World world = {.folder = dir / "checkpoints", .ranks = 3};
  world.run([](Rank& rank) {
    rank.publish(1);
    rank.state.fill(2);
    rank.begin(2);
    rank.store->abandon("replicas differ");
    EXPECT_FALSE(rank.store->in_flight());
    rank.state.fill(3);
    rank.begin(3);
    ASSERT_TRUE(rank.store->complete().ok());
    rank.store->wait();
    const std::vector<CheckpointOutcome> outcomes = rank.store->take_outcomes();
    if (rank.is_first()) {
      ASSERT_EQ(outcomes.size(), 2u);
      EXPECT_EQ(outcomes[0].reason, "e0001-a0000000002 abandoned: replicas differ");
      EXPECT_TRUE(outcomes[1].published) << outcomes[1].reason;
    }
    rank.expect_restored(3);
  });
  EXPECT_EQ(names_in(dir / "checkpoints"), (Names{"e0001-a0000000001", "e0001-a0000000003"}));
}

TEST(CheckpointAbandon, APartThatIsStillBeingWrittenHoldsUpNeitherTheAbandonNorTheOutcome) {
  MemoryDir dir;
  GatedFileSystem files;
  World world = {.folder = dir / "checkpoints"};
  world.files = [&](int) -> FileSystem& { return files; };
  world.run([&](Rank& rank) {
    files.close();
    rank.state.fill(2);
    rank.begin(2);
    files.wait_for_a_writer();
    rank.store->abandon("replicas differ");
    EXPECT_FALSE(rank.store->in_flight());
    rank.state.fill(3);
    std::atomic<bool> opened = false;
    std::thread disk([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      opened = true;
      files.open();
    });
    rank.begin(3);
    EXPECT_TRUE(opened) << "the writer may still read the copy that this one takes the place of";
    disk.join();
    ASSERT_TRUE(rank.store->complete().ok());
    rank.store->wait();
    const std::vector<CheckpointOutcome> outcomes = rank.store->take_outcomes();
    ASSERT_EQ(outcomes.size(), 2u);
    EXPECT_EQ(outcomes[0].reason, "e0001-a0000000002 abandoned: replicas differ");
    EXPECT_FALSE(outcomes[0].published);
    EXPECT_TRUE(outcomes[1].published) << outcomes[1].reason;
    rank.expect_restored(3);
  });
  EXPECT_EQ(names_in(dir / "checkpoints"), Names{"e0001-a0000000003"});
}

TEST(CheckpointAbandon, ARestoreAbandonsWhatIsInFlight) {
  MemoryDir dir;
  const World world = {.folder = dir / "checkpoints", .ranks = 2};
  world.run([](Rank& rank) {
    rank.publish(1);
    rank.state.fill(2);
    rank.begin(2);
    rank.expect_restored(1);
    EXPECT_FALSE(rank.store->in_flight());
  });
  EXPECT_EQ(names_in(dir / "checkpoints"), Names{"e0001-a0000000001"});
}

TEST(CheckpointSave, ReturnsWhileASlowDiskStillWrites) {
  MemoryDir dir;
  GatedFileSystem files;
  World world = {.folder = dir / "checkpoints"};
  world.files = [&](int) -> FileSystem& { return files; };
  world.run([&](Rank& rank) {
    files.close();
    rank.state.fill(2);
    rank.begin(2);  // would hang here
    EXPECT_FALSE(rank.store->part_done());
    files.wait_for_a_writer();
    EXPECT_FALSE(rank.store->part_done());
    rank.state.scribble();
    files.open();
    EXPECT_TRUE(rank.finish().published);
    rank.expect_restored(2);
  });
}

}  // namespace
}  // namespace holdfast
