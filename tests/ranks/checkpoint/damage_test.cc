// Generations that are damaged on disk, or that not all ranks see.
#include "forwarding_file_system.h"
#include "holdfast/checkpoint/manifest.pb.h"
#include "store_world.h"

namespace holdfast {
namespace {

namespace fs = std::filesystem;
using Names = std::vector<std::string>;

void tiny_model(RankState& state) {
  state.add("w", DType::kFloat32, {2}, Held::kReplicated);
  state.add("o", DType::kFloat16, {2}, Held::kPerRank);
  state.add_sharded("s", DType::kFloat32, 3);
  state.add_bytes("b", Held::kPerRank);
}

class Damage : public testing::Test {
 protected:
  Damage() {
    world_.run([](Rank& rank) {
      for (const std::uint64_t attempt : {1u, 2u, 3u}) rank.publish(attempt);
    });
  }
  Names files_of_3() const { return names_in(folder_3_); }
  // 2 is restored, 3 is refused for a reason that names what is wrong, and lies in set-aside/ as it was. Puts
  // it back.
  void expect_3_set_aside(const std::string& what) {
    const auto damaged = contents(folder_3_);
    std::string reason;
    world_.run([&](Rank& rank) {
      const RestoredGeneration restored = rank.expect_restored(2);
      if (!rank.is_first()) return;
      ASSERT_EQ(restored.refused.size(), 1u);
      reason = restored.refused.front();
      EXPECT_EQ(names_of(rank.store->generations()), (Names{"e0001-a0000000001", "e0001-a0000000002"}));
    });
    EXPECT_TRUE(reason.starts_with("e0001-a0000000003 refused: ")) << reason;
    EXPECT_NE(reason.find(what), std::string::npos) << reason;
    EXPECT_TRUE(reason.ends_with("; set aside as " + aside_)) << reason;
    ASSERT_EQ(contents(aside_), damaged);
    fs::rename(aside_, folder_3_);
  }
  static std::map<std::string, std::string> contents(const std::string& folder) {
    std::map<std::string, std::string> files;
    for (const std::string& name : names_in(folder)) files[name] = read_file(folder + "/" + name);
    return files;
  }

  MemoryDir dir_;
  World world_ = {.folder = dir_ / "checkpoints", .ranks = 2, .declare = tiny_model};
  const std::string folder_3_ = dir_ / "checkpoints/e0001-a0000000003";
  const std::string aside_ = dir_ / "checkpoints/set-aside/e0001-a0000000003";
};

// Field case 22: the newest is truncated by one byte, or to nothing.
using Case22HalfWrittenCheckpointTrusted = Damage;
TEST_F(Case22HalfWrittenCheckpointTrusted, AFileThatIsTruncatedOrGoneOrTooMuch) {
  for (const std::string& name : files_of_3()) {
    const std::string path = folder_3_ + "/" + name;
    const std::string whole = read_file(path);
    write_file(path, whole.substr(0, whole.size() - 1));
    expect_3_set_aside(name);
    write_file(path, "");
    expect_3_set_aside(name);
    write_file(path, whole + "x");
    expect_3_set_aside(name);
    fs::remove(path);
    expect_3_set_aside(name);
    write_file(path, whole);
  }
  write_file(folder_3_ + "/rank-00002.safetensors", "");
  expect_3_set_aside("rank-00002.safetensors is not in the manifest");
  fs::remove(folder_3_ + "/rank-00002.safetensors");
  world_.run([](Rank& rank) { rank.expect_restored(3); });
}

TEST_F(Damage, OneFlippedBitInAnyByteIsFound) {
  std::size_t flips = 0;
  for (const std::string& name : files_of_3()) {
    const std::string path = folder_3_ + "/" + name;
    std::string bytes = read_file(path);
    for (std::size_t i = 0; i < bytes.size() && !HasFailure(); ++i) {
      const char before = bytes[i];
      bytes[i] = static_cast<char>(before ^ (1 << (i % 8)));
      write_file(path, bytes);
      SCOPED_TRACE(name + " byte " + std::to_string(i));
      expect_3_set_aside("");
      bytes[i] = before;
      ++flips;
    }
    write_file(path, bytes);
  }
  EXPECT_GT(flips, 1000u);
  world_.run([](Rank& rank) { rank.expect_restored(3); });
}

TEST_F(Damage, WhenAllAreDamagedThereIsNoCleanGenerationAndEveryReasonIsSaid) {
  for (const char* name : {"e0001-a0000000001", "e0001-a0000000002", "e0001-a0000000003"}) {
    const std::string path = world_.folder + "/" + name + "/rank-00001.safetensors";
    std::string bytes = read_file(path);
    bytes.back() = static_cast<char>(bytes.back() ^ 1);
    write_file(path, bytes);
  }
  world_.run([&](Rank& rank) {
    RestoredGeneration restored;
    const Status status = rank.store->restore(&restored);
    EXPECT_EQ(status.code(), StatusCode::kNoCleanGeneration);
    for (const char* name :
         {"e0001-a0000000001 refused: ", "e0001-a0000000002 refused: ", "e0001-a0000000003 refused: "})
      EXPECT_NE(status.message().find(name), std::string::npos) << status.message();
    EXPECT_EQ(restored.refused.size(), rank.is_first() ? 3u : 0u);
  });
  EXPECT_EQ(names_in(world_.folder), Names{"set-aside"});
}

TEST_F(Damage, AWholeGenerationWithANonFiniteValueIsNotRestored) {
  // As a writer without a scan would leave it.
  World other = world_;
  other.declare = [](RankState& state) {
    StateTensor tensor;
    tensor.name = "w";
    tensor.shape = {2};
    tensor.must_be_finite = false;
    state.add_tensor(tensor);
  };
  other.folder = dir_ / "other";
  other.ranks = 1;
  other.run([](Rank& rank) {
    rank.publish(1);
    rank.state.fill(2);
    rank.state.set("w", 1, std::numeric_limits<float>::infinity());
    rank.begin(2);
    EXPECT_TRUE(rank.finish().published);
  });
  Manifest manifest;
  const GenerationId id{1, 2};
  ASSERT_TRUE(read_manifest(real_file_system(), other.folder, id, &manifest).ok());
  manifest.mutable_parts(0)->mutable_tensors(0)->clear_may_be_non_finite();
  write_file(generation_path(other.folder, id) + "/manifest.pb", encode_manifest(manifest));
  other.run([](Rank& rank) {
    const RestoredGeneration restored = rank.expect_restored(1);
    ASSERT_EQ(restored.refused.size(), 1u);
    EXPECT_NE(restored.refused[0].find("w[1] is +Inf; set aside as"), std::string::npos)
        << restored.refused[0];
  });
}

TEST_F(Damage, AManifestWhoseShardsDoNotCoverTheirArrayIsDamaged) {
  Manifest manifest;
  const GenerationId id{1, 3};
  ASSERT_TRUE(read_manifest(real_file_system(), world_.folder, id, &manifest).ok());
  for (Part& part : *manifest.mutable_parts()) {
    for (TensorEntry& entry : *part.mutable_tensors()) {
      if (entry.has_shard_total() && part.rank() == 1) entry.set_shard_offset(0);
    }
  }
  write_file(folder_3_ + "/manifest.pb", encode_manifest(manifest));
  expect_3_set_aside("sharded s: element 0 is held twice");
}

TEST_F(Damage, ANameThatIsTakenInSetAsideGetsANumber) {
  const std::string part = folder_3_ + "/rank-00000.safetensors";
  const auto damaged_again = [&] {
    write_file(part, "");
    world_.run([](Rank& rank) { rank.expect_restored(2); });
    fs::create_directory(folder_3_);
  };
  damaged_again();
  damaged_again();
  damaged_again();
  fs::remove(folder_3_ + "/");
  fs::remove_all(folder_3_);
  EXPECT_EQ(names_in(dir_ / "checkpoints/set-aside"),
            (Names{"e0001-a0000000003", "e0001-a0000000003.2", "e0001-a0000000003.3"}));
}

TEST_F(Damage, NewerOnesThatTheRunHasLeftBehindAreSetAside) {
  world_.run([](Rank& rank) {
    RestoredGeneration restored;
    ASSERT_TRUE(rank.store->restore(&restored, GenerationId{1, 1}).ok());
    ASSERT_TRUE(rank.store->set_aside_newer({1, 1}).ok());
    rank.wait_for_all();
    EXPECT_EQ(names_of(rank.store->generations()), rank.is_first() ? Names{"e0001-a0000000001"} : Names{});
    rank.expect_restored(1);
  });
  EXPECT_EQ(names_in(world_.folder), (Names{"e0001-a0000000001", "set-aside"}));
  EXPECT_EQ(names_in(dir_ / "checkpoints/set-aside"), (Names{"e0001-a0000000002", "e0001-a0000000003"}));
}

TEST_F(Damage, AnEmptyFolderIsNoCleanGeneration) {
  world_.folder = dir_ / "empty";
  world_.run([&](Rank& rank) {
    RestoredGeneration restored;
    const Status status = rank.store->restore(&restored);
    EXPECT_EQ(status.code(), StatusCode::kNoCleanGeneration);
    EXPECT_EQ(status.message(), "no generation to restore in " + world_.folder);
  });
}

// ---- ranks that see different sets

class Hidden : public Damage {
 protected:
  void hide(int rank, std::vector<std::string> texts) {
    hidden_[rank] = std::make_unique<HidingFileSystem>(std::move(texts));
    world_.files = [this](int r) -> FileSystem& {
      return hidden_.contains(r) ? *hidden_.at(r) : real_file_system();
    };
  }
  std::map<int, std::unique_ptr<HidingFileSystem>> hidden_;
};

TEST_F(Hidden, TheNewestThatAllSeeIsRestoredAndTheOthersStay) {
  const Names before = names_in(world_.folder);
  hide(1, {"e0001-a0000000003"});
  world_.run([](Rank& rank) {
    const RestoredGeneration restored = rank.expect_restored(2);
    if (!rank.is_first()) return;
    ASSERT_EQ(restored.refused.size(), 1u);
    EXPECT_TRUE(restored.refused[0].starts_with("e0001-a0000000003 passed over: rank 1: "));
    EXPECT_TRUE(restored.refused[0].ends_with("(rank 0 finds it clean, so it stays)"));
  });
  EXPECT_EQ(names_in(world_.folder), before);
  hide(0, {"e0001-a0000000002"});
  world_.run([](Rank& rank) { rank.expect_restored(1); });
  EXPECT_EQ(names_in(world_.folder), before);
}

TEST_F(Hidden, APartThatOneRankDoesNotSeeIsNotRestoredByAny) {
  const Names before = names_in(world_.folder);
  hide(1, {"e0001-a0000000003/rank-00001.safetensors"});
  world_.run([](Rank& rank) { rank.expect_restored(2); });
  EXPECT_EQ(names_in(world_.folder), before);
}

TEST_F(Hidden, WhatRankZeroFindsDamagedTooIsSetAside) {
  hide(1, {"e0001-a0000000003/manifest.pb"});
  const std::string path = folder_3_ + "/rank-00001.safetensors";
  std::string bytes = read_file(path);
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  write_file(path, bytes);
  expect_3_set_aside("rank-00001.safetensors is damaged");
}

TEST_F(Hidden, RanksWithOtherManifestsOfOneNameDoNotMixThem) {
  // Rank 1 has a folder of its own, with a generation of the same name and model.
  class OtherFolder final : public ForwardingFileSystem {
   public:
    OtherFolder(std::string from, std::string to) : from_(std::move(from)), to_(std::move(to)) {}
    Status open_file(const std::string& path, std::unique_ptr<ReadableFile>* out) override {
      const auto at = path.find(from_);
      if (at == std::string::npos) return ForwardingFileSystem::open_file(path, out);
      return ForwardingFileSystem::open_file(std::string(path).replace(at, from_.size(), to_), out);
    }

   private:
    const std::string from_, to_;
  };
  World other = world_;
  other.folder = dir_ / "other";
  other.run([](Rank& rank) {
    rank.state.fill(77);
    rank.begin(3);
    rank.finish();
  });
  OtherFolder files("checkpoints/e0001-a0000000003", "other/e0001-a0000000003");
  world_.files = [&](int rank) -> FileSystem& { return rank == 1 ? files : real_file_system(); };
  world_.run([](Rank& rank) {
    const RestoredGeneration restored = rank.expect_restored(2);
    if (!rank.is_first()) return;
    ASSERT_EQ(restored.refused.size(), 1u);
    EXPECT_NE(restored.refused[0].find("rank 1: the manifest is another than rank 0's"), std::string::npos);
  });
}

}  // namespace
}  // namespace holdfast
