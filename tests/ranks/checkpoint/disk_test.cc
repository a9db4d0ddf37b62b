// Disks that are full or small, and what retention leaves on them.
#include "coord/storage/faulty_file_system.h"
#include "coord/storage/small_disk.h"
#include "store_world.h"

namespace holdfast {
namespace {

namespace fs = std::filesystem;
using Names = std::vector<std::string>;

Names generation_names(std::initializer_list<int> attempts) {
  Names names;
  for (const int attempt : attempts)
    names.push_back(GenerationId{1, static_cast<std::uint64_t>(attempt)}.name());
  return names;
}

std::uint64_t bytes_in(const std::string& folder) {
  std::uint64_t bytes = 0;
  EXPECT_TRUE(tree_bytes(real_file_system(), folder, &bytes).ok());
  return bytes;
}

// Field case 27: the old generation is intact, it is said, and the next one is written when there is room
// again.
TEST(Case27DiskFull, AtAnyByteTheOldGenerationIsIntactAndTheNextSaveWorks) {
  MemoryDir dir;
  FaultyFileSystem files;
  World world = {.folder = dir / "checkpoints", .ranks = 2};
  world.files = [&](int) -> FileSystem& { return files; };
  world.run([&](Rank& rank) {
    rank.publish(1);
    rank.wait_for_all();
    const std::uint64_t before = files.appended_bytes();
    rank.wait_for_all();
    rank.publish(2);
    rank.wait_for_all();
    const std::uint64_t size = files.appended_bytes() - before;
    ASSERT_GT(size, 500u);
    for (std::uint64_t fits = 0; fits < size; fits += 17) {
      const std::uint64_t attempt = 10 + 2 * fits;
      rank.wait_for_all();
      if (rank.is_first()) files.full_after(fits);
      rank.wait_for_all();
      const CheckpointOutcome outcome = rank.publish(attempt);
      rank.wait_for_all();
      if (rank.is_first()) {
        EXPECT_FALSE(outcome.published);
        EXPECT_FALSE(outcome.non_finite);
        EXPECT_NE(outcome.reason.find("No space left on device"), std::string::npos) << outcome.reason;
        EXPECT_EQ(outcome.removed, Names{});
        files.space_is_back();
      }
      rank.wait_for_all();
      rank.expect_restored(fits == 0 ? 2 : 10 + 2 * (fits - 17) + 1);
      EXPECT_EQ(rank.publish(attempt + 1).published, rank.is_first());
    }
  });
  EXPECT_EQ(names_in(world.folder).size(), 3u);
}

TEST(Case27DiskFull, ADiskWithoutRoomIsNotFilledFirst) {
  MemoryDir dir;
  FaultyFileSystem files;
  World world = {.folder = dir / "checkpoints"};
  world.files = [&](int) -> FileSystem& { return files; };
  world.run([&](Rank& rank) {
    rank.publish(1);
    files.report_free(100);
    const std::uint64_t before = files.appended_bytes();
    const CheckpointOutcome outcome = rank.publish(2);
    EXPECT_FALSE(outcome.published);
    EXPECT_TRUE(outcome.reason.starts_with("e0001-a0000000002 refused: rank 0: no space in " + world.folder))
        << outcome.reason;
    EXPECT_EQ(files.appended_bytes(), before);
    files.report_free(1 << 20);
    EXPECT_TRUE(rank.publish(3).published);
  });
}

TEST(Case27DiskFull, OnARealFileSystemOfOneMebibyte) {
  SmallDisk disk("1M");
  if (!disk.mounted()) GTEST_SKIP() << disk.why_not();
  World world = {.folder = disk / "checkpoints", .ranks = 2};
  world.declare = [](RankState& state) {
    state.add("weight", DType::kFloat32, {50'000}, Held::kReplicated);  // 200 kB
    state.add("own", DType::kFloat32, {25'000}, Held::kPerRank);
  };
  world.run([&](Rank& rank) {
    EXPECT_EQ(rank.publish(1).published, rank.is_first());
    EXPECT_EQ(rank.publish(2).published, rank.is_first());
    const CheckpointOutcome outcome = rank.publish(3);
    if (rank.is_first()) {
      EXPECT_FALSE(outcome.published);
      EXPECT_NE(outcome.reason.find("o space"), std::string::npos) << outcome.reason;
      EXPECT_EQ(names_in(world.folder), generation_names({1, 2}));
      fs::remove_all(generation_path(world.folder, {1, 1}));
    }
    rank.wait_for_all();
    rank.expect_restored(2);
    EXPECT_EQ(rank.publish(4).published, rank.is_first());
    rank.expect_restored(4);
  });
  EXPECT_EQ(names_in(world.folder), generation_names({2, 4}));
}

TEST(CheckpointRetention, ARunThatLostItsFolderPublishesAndRemovesNothing) {
  MemoryDir dir;
  World world = {.folder = dir / "checkpoints"};
  bool lost = false;
  world.options.keep = 1;
  world.options.before_publication = [&]() -> Status {
    return lost ? Status(StatusCode::kRanksDisagree, "taken over") : Status();
  };
  world.run([&](Rank& rank) {
    EXPECT_TRUE(rank.publish(1).published);
    lost = true;
    const CheckpointOutcome outcome = rank.publish(2);
    EXPECT_FALSE(outcome.published);
    EXPECT_NE(outcome.reason.find("taken over"), std::string::npos) << outcome.reason;
  });
  EXPECT_EQ(names_in(world.folder), generation_names({1}));
}

TEST(CheckpointRetention, KeepsTheNewestAndEveryMth) {
  MemoryDir dir;
  World world = {.folder = dir / "checkpoints", .ranks = 2};
  world.options = {.interval_attempts = 10, .keep = 2, .keep_every = 3};
  std::vector<std::string> removed;
  const auto publish = [&](Rank& rank, std::uint64_t attempt) {
    const CheckpointOutcome outcome = rank.publish(attempt);
    removed.insert(removed.end(), outcome.removed.begin(), outcome.removed.end());
  };
  world.run([&](Rank& rank) {
    if (!rank.is_first()) {
      for (std::uint64_t attempt = 10; attempt <= 50; attempt += 10) rank.publish(attempt);
      return;
    }
    for (std::uint64_t attempt = 10; attempt <= 50; attempt += 10) publish(rank, attempt);
  });
  EXPECT_EQ(removed, generation_names({10, 20}));
  // A restart remembers by the attempts alone.
  world.run([&](Rank& rank) {
    for (std::uint64_t attempt = 60; attempt <= 80; attempt += 10) rank.publish(attempt);
  });
  EXPECT_EQ(names_in(world.folder), generation_names({30, 60, 70, 80}));
}

TEST(CheckpointRetention, AQuotaHoldsAndARefusedGenerationCostsNoOldOne) {
  MemoryDir dir;
  World world = {.folder = dir / "checkpoints"};
  world.options = {.interval_attempts = 1, .keep = 10};
  std::uint64_t size = 0;
  world.run([&](Rank& rank) { size = rank.publish(1).bytes; });
  EXPECT_EQ(size, bytes_in(world.folder));
  world.options.quota_bytes = 3 * size + size / 2;
  world.run([&](Rank& rank) {
    for (std::uint64_t attempt = 2; attempt <= 6; ++attempt) {
      const CheckpointOutcome outcome = rank.publish(attempt);
      EXPECT_TRUE(outcome.published) << outcome.reason;
      EXPECT_LE(bytes_in(world.folder), world.options.quota_bytes);
    }
  });
  EXPECT_EQ(names_in(world.folder), generation_names({4, 5, 6}));
  world.options.quota_bytes = size + size / 2;
  world.run([&](Rank& rank) {
    const CheckpointOutcome outcome = rank.publish(7);
    EXPECT_FALSE(outcome.published);
    EXPECT_NE(outcome.reason.find("e0001-a0000000007 refused: its "), std::string::npos) << outcome.reason;
    EXPECT_NE(outcome.reason.find("more than the quota of "), std::string::npos) << outcome.reason;
    EXPECT_EQ(outcome.removed, Names{});
    rank.expect_restored(6);
  });
  EXPECT_EQ(names_in(world.folder), generation_names({4, 5, 6}));
}

TEST(CheckpointRetention, AnOldOneThatCannotBeRemovedIsSaidAndTheNewOneIsPublished) {
  MemoryDir dir;
  World world = {.folder = dir / "checkpoints"};
  world.options = {.interval_attempts = 1, .keep = 1};
  FaultyFileSystem files;
  world.files = [&](int) -> FileSystem& { return files; };
  world.run([&](Rank& rank) {
    rank.publish(1);
    rank.state.fill(2);
    // The second rename of a publication is that of the generation to remove.
    const int begun = files.calls();
    rank.publish(2);
    const std::vector<std::string> log = files.log();
    int to_remove = 0;
    for (std::size_t i = static_cast<std::size_t>(begun); i < log.size(); ++i) {
      if (log[i].starts_with("rename")) to_remove = static_cast<int>(i) - begun;
    }
    files.fail_at(files.calls() + to_remove + 1);
    const CheckpointOutcome outcome = rank.publish(3);
    EXPECT_TRUE(outcome.published);
    EXPECT_TRUE(outcome.reason.starts_with("cannot remove e0001-a0000000002: ")) << outcome.reason;
    EXPECT_EQ(names_of(rank.store->generations()), generation_names({2, 3}));
    EXPECT_EQ(rank.publish(4).removed, generation_names({2, 3}));
  });
  EXPECT_EQ(names_in(world.folder), generation_names({4}));
}

}  // namespace
}  // namespace holdfast
