// Another number of ranks, or another model, than the generation was written with.
#include "forwarding_file_system.h"
#include "holdfast/checkpoint/manifest.pb.h"
#include "store_world.h"

namespace holdfast {
namespace {

using Names = std::vector<std::string>;

void sharded_model(RankState& state) {
  state.add("weight", DType::kFloat32, {3, 2}, Held::kReplicated);
  state.add_bytes("schedule", Held::kReplicated);
  for (const DType dtype : kAllDTypes)
    state.add_sharded("moment/" + std::string(dtype_name(dtype)), dtype, 29);
  state.add_sharded("short", DType::kFloat32, 1);  // of which most ranks have nothing
}

TEST(CheckpointReshape, ShardsArePutTogetherFourToTwoToThreeToOneToFour) {
  MemoryDir dir;
  World world = {.folder = dir / "checkpoints", .declare = sharded_model};
  world.ranks = 4;
  world.run([](Rank& rank) { rank.publish(1); });
  std::uint64_t from = 4;
  std::uint64_t attempt = 1;
  for (const int ranks : {2, 3, 1, 4}) {
    world.ranks = ranks;
    world.run([&](Rank& rank) {
      EXPECT_EQ(rank.expect_restored(attempt).ranks, from);
      EXPECT_EQ(rank.publish(attempt + 1).published, rank.is_first());
    });
    from = static_cast<std::uint64_t>(ranks);
    ++attempt;
  }
}

TEST(CheckpointReshape, ShardsNeedNotBeEvenNorOnEveryRank) {
  MemoryDir dir;
  World world = {.folder = dir / "checkpoints", .ranks = 3};
  world.declare = [](RankState& state) {
    if (state.rank() == 0) state.add_shard("moment", DType::kFloat16, 90, 100, 100);
    if (state.rank() == 1) state.add_shard("moment", DType::kFloat16, 0, 1, 100);
    if (state.rank() == 2) state.add_shard("moment", DType::kFloat16, 1, 90, 100);
  };
  world.run([](Rank& rank) { rank.publish(1); });
  world.declare = [](RankState& state) {
    if (state.rank() == 1) state.add_shard("moment", DType::kFloat16, 0, 95, 100);
    if (state.rank() == 2) state.add_shard("moment", DType::kFloat16, 95, 100, 100);
  };
  world.run([](Rank& rank) { rank.expect_restored(1); });
}

TEST(CheckpointReshape, AFlippedBitInAnyOldRanksShardIsFound) {
  for (int old_rank = 0; old_rank < 4; ++old_rank) {
    MemoryDir dir;
    World world = {.folder = dir / "checkpoints", .ranks = 4, .declare = sharded_model};
    world.run([](Rank& rank) {
      rank.publish(1);
      rank.publish(2);
    });
    const std::string path =
        dir / ("checkpoints/e0001-a0000000002/rank-0000" + std::to_string(old_rank) + ".safetensors");
    std::string bytes = read_file(path);
    bytes[bytes.size() - 1] = static_cast<char>(bytes.back() ^ 4);
    write_file(path, bytes);
    world.ranks = 2;
    world.run([](Rank& rank) { rank.expect_restored(1); });
    EXPECT_TRUE(std::filesystem::exists(dir / "checkpoints/set-aside/e0001-a0000000002")) << old_rank;
  }
}

// ---- another model

// Nothing is set aside, and nothing older tried.
void expect_usage(const World& world, const std::string& why) {
  const Names before = names_in(world.folder);
  world.run([&](Rank& rank) {
    RestoredGeneration restored;
    const auto values = rank.state.values();
    const Status status = rank.store->restore(&restored);
    EXPECT_EQ(status.code(), StatusCode::kUsage) << status.to_string();
    EXPECT_EQ(status.message(), why);
    EXPECT_EQ(rank.state.values(), values) << "touched";
  });
  EXPECT_EQ(names_in(world.folder), before);
}

class AnotherModel : public testing::Test {
 protected:
  AnotherModel() {
    world_.run([](Rank& rank) {
      rank.publish(1);
      rank.publish(2);
    });
  }
  static void declare(RankState& state) {
    state.add("weight", DType::kFloat32, {2, 3}, Held::kReplicated);
    state.add_bytes("schedule", Held::kReplicated);
    state.add_sharded("moment", DType::kFloat32, 10);
    state.add("own", DType::kFloat32, {2}, Held::kPerRank);
  }
  static std::string told(const std::string& why) {
    return "e0001-a0000000002 is of another model or run: rank 0: " + why;
  }
  MemoryDir dir_;
  World world_ = {.folder = dir_ / "checkpoints", .ranks = 2, .declare = declare};
};

TEST_F(AnotherModel, AnotherShape) {
  world_.declare = [](RankState& state) {
    state.add("weight", DType::kFloat32, {3, 2}, Held::kReplicated);
    state.add_bytes("schedule", Held::kReplicated);
    state.add_sharded("moment", DType::kFloat32, 10);
    state.add("own", DType::kFloat32, {2}, Held::kPerRank);
  };
  expect_usage(world_, told("weight is F32[3,2] in this run's state and F32[2,3] in the generation"));
}

TEST_F(AnotherModel, AnotherTypeOfARanksOwn) {
  world_.declare = [](RankState& state) {
    state.add("weight", DType::kFloat32, {2, 3}, Held::kReplicated);
    state.add_bytes("schedule", Held::kReplicated);
    state.add_sharded("moment", DType::kFloat32, 10);
    state.add("own", DType::kFloat16, {2}, Held::kPerRank);
  };
  expect_usage(world_, told("own is F16[2] in this rank's own state and F32[2] in the generation"));
}

TEST_F(AnotherModel, OneTensorMore) {
  world_.declare = [](RankState& state) {
    declare(state);
    state.add("bias", DType::kFloat32, {2}, Held::kReplicated);
  };
  expect_usage(world_, told("bias is in this run's state and not in the generation"));
}

TEST_F(AnotherModel, BytesMissing) {
  world_.declare = [](RankState& state) {
    state.add("weight", DType::kFloat32, {2, 3}, Held::kReplicated);
    state.add_sharded("moment", DType::kFloat32, 10);
    state.add("own", DType::kFloat32, {2}, Held::kPerRank);
  };
  expect_usage(world_, told("schedule is in the generation and not in this run's state"));
}

TEST_F(AnotherModel, AnotherLengthOfAShardedArray) {
  world_.declare = [](RankState& state) {
    state.add("weight", DType::kFloat32, {2, 3}, Held::kReplicated);
    state.add_bytes("schedule", Held::kReplicated);
    state.add_sharded("moment", DType::kFloat32, 12);
    state.add("own", DType::kFloat32, {2}, Held::kPerRank);
  };
  expect_usage(world_, told("sharded moment is 12 x F32 in this run's state and 10 x F32 in the generation"));
}

TEST_F(AnotherModel, NoLongerSharded) {
  world_.declare = [](RankState& state) {
    state.add("weight", DType::kFloat32, {2, 3}, Held::kReplicated);
    state.add_bytes("schedule", Held::kReplicated);
    state.add("own", DType::kFloat32, {2}, Held::kPerRank);
  };
  expect_usage(world_, told("sharded moment is in the generation and not in this run's state"));
}

TEST_F(AnotherModel, AnotherNumberOfRanksAndStateOfTheirOwn) {
  world_.ranks = 3;
  expect_usage(
      world_, told("it is of 2 ranks and this run has 3, but own is the own state of its rank 0, which suits "
                   "no other number of ranks"));
}

TEST_F(AnotherModel, OnOneRankOnlyIsTheSameOnEveryRank) {
  world_.declare = [](RankState& state) {
    declare(state);
    if (state.rank() == 1) state.add("more", DType::kFloat32, {2}, Held::kPerRank);
  };
  expect_usage(
      world_,
      "e0001-a0000000002 is of another model or run: rank 1: more is in this rank's own state and not "
      "in the generation");
}

// ---- loads that fail

TEST(CheckpointLoad, ALoadThatRefusesOrThrowsEndsTheRestoreOnEveryRank) {
  for (const bool throws : {false, true}) {
    MemoryDir dir;
    World world = {.folder = dir / "checkpoints", .ranks = 2};
    world.declare = [&](RankState& state) {
      state.add("weight", DType::kFloat32, {2}, Held::kReplicated);
      StateBytes rng;
      rng.name = "rng";
      rng.held = Held::kPerRank;
      rng.save = [] { return Bytes("7"); };
      rng.load = [&, rank = state.rank()](const Bytes&) -> Status {
        if (rank == 0) return Status();
        if (throws) throw std::runtime_error("of another library");
        return {StatusCode::kNoCleanGeneration, "of another library"};
      };
      state.state().add(rng);
    };
    world.run([&](Rank& rank) {
      rank.publish(1);
      rank.publish(2);
      RestoredGeneration restored;
      const Status status = rank.store->restore(&restored);
      EXPECT_EQ(status.code(), throws ? StatusCode::kInternal : StatusCode::kUsage);
      EXPECT_EQ(status.message(), "e0001-a0000000002: rank 1: loading rng failed: of another library");
    });
    EXPECT_EQ(names_in(dir / "checkpoints"), (Names{"e0001-a0000000001", "e0001-a0000000002"}));
  }
}

// ---- create()

void expect_create_fails(const World& world, const std::string& why) {
  world.start([&](Rank& rank, const Status& created) {
    EXPECT_EQ(created.code(), StatusCode::kUsage) << created.to_string();
    EXPECT_EQ(created.message().substr(0, why.size()), why);
    EXPECT_EQ(rank.store, nullptr);
  });
}

TEST(CheckpointCreate, RefusesRanksThatShareAnotherState) {
  MemoryDir dir;
  World world = {.folder = dir / "checkpoints", .ranks = 4};
  world.declare = [](RankState& state) {
    state.add("weight", DType::kFloat32, {state.rank() >= 2 ? 5 : 6}, Held::kReplicated);
  };
  expect_create_fails(
      world,
      "rank 2: the ranks share another state: weight is F32[5] in its replicated state and F32[6] "
      "in rank 0's");
}

TEST(CheckpointCreate, RefusesArraysThatTheRanksDoNotHoldExactlyOnce) {
  MemoryDir dir;
  World world = {.folder = dir / "checkpoints", .ranks = 2};
  const auto shards = [&](std::int64_t first_end, std::int64_t second_begin, std::int64_t second_total) {
    world.declare = [=](RankState& state) {
      if (state.rank() == 0) state.add_shard("m", DType::kFloat32, 0, first_end, 10);
      if (state.rank() == 1) state.add_shard("m", DType::kFloat32, second_begin, 10, second_total);
    };
  };
  shards(5, 6, 10);
  expect_create_fails(world, "rank 0: sharded m: element 5 of 10 is held by no rank");
  shards(6, 5, 10);
  expect_create_fails(world, "rank 0: sharded m: element 5 is held twice, by rank 1 too");
  shards(5, 5, 11);
  expect_create_fails(world, "rank 0: sharded m: rank 0 holds a part of 10 x F32 and rank 1 one of 11 x F32");
}

TEST(CheckpointCreate, RefusesBadOptionsFoldersAndStates) {
  MemoryDir dir;
  World world = {.folder = dir / "checkpoints", .ranks = 2};
  world.options.keep = 0;
  expect_create_fails(world, "rank 0: checkpoints: keep must be at least 1");
  world.options.keep = 1;
  world.folder = "";
  expect_create_fails(world, "rank 0: checkpoints: no folder is given");
  world.folder = dir / "nowhere/checkpoints";
  expect_create_fails(world, "rank 0: cannot ");
  write_file(dir / "file", "");
  world.folder = dir / "file";
  expect_create_fails(world, "rank 0: ");
  world.folder = dir / "checkpoints";
  world.declare = [](RankState& state) {
    state.add("weight", DType::kFloat32, {2}, Held::kReplicated);
    if (state.rank() == 1) state.add("weight", DType::kFloat32, {2}, Held::kReplicated);
  };
  expect_create_fails(world, "rank 1: ");
}

TEST(CheckpointCreate, RefusesAFolderThatARankDoesNotSee) {
  MemoryDir dir;
  HidingFileSystem blind({"seen-by-all"});
  World world = {.folder = dir / "checkpoints", .ranks = 3};
  world.files = [&](int rank) -> FileSystem& { return rank == 1 ? blind : real_file_system(); };
  expect_create_fails(world, "rank 1: what rank 0 writes into " + world.folder + " is not seen here");
  EXPECT_EQ(names_in(world.folder), Names{});
}

}  // namespace
}  // namespace holdfast
