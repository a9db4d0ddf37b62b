// A checkpoint store on ranks that are threads.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "coord/temp_dir.h"
#include "holdfast/checkpoint/checkpoint_store.h"
#include "holdfast/collectives/thread_collective.h"
#include "rank_state.h"

namespace holdfast {

// A TempDir in memory, for tests that write and sync very often.
class MemoryDir {
 public:
  MemoryDir() : MemoryDir(std::filesystem::is_directory("/dev/shm") ? "/dev/shm" : "/tmp") {}
  ~MemoryDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  MemoryDir(const MemoryDir&) = delete;
  MemoryDir& operator=(const MemoryDir&) = delete;
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  explicit MemoryDir(std::string parent) : path_(std::move(parent) + "/holdfast_test_XXXXXX") {
    if (mkdtemp(path_.data()) == nullptr) abort();
  }
  std::string path_;
};

struct Rank {
  Collective& collective;
  RankState& state;
  std::unique_ptr<CheckpointStore> store;

  int number() const { return collective.rank(); }
  bool is_first() const { return collective.rank() == 0; }

  void begin(std::uint64_t attempt, std::uint64_t epoch = 1) {
    store->save({epoch, attempt, attempt / 2, attempt / 3}, is_first() ? memory_of(attempt) : "");
  }
  void wait_for_all() { EXPECT_TRUE(agree_on_status(collective, Status()).ok()); }
  // What the trainer holds now, as a generation; the outcome on rank 0.
  CheckpointOutcome finish() {
    EXPECT_TRUE(store->complete().ok());
    store->wait();
    const std::vector<CheckpointOutcome> outcomes = store->take_outcomes();
    EXPECT_EQ(outcomes.size(), is_first() ? 1u : 0u);
    return outcomes.empty() ? CheckpointOutcome() : outcomes.front();
  }
  CheckpointOutcome publish(std::uint64_t attempt, std::uint64_t epoch = 1) {
    state.fill(attempt);
    begin(attempt, epoch);
    return finish();
  }
  // Restores, and expects exactly what publish(attempt) had.
  RestoredGeneration expect_restored(std::uint64_t attempt, std::uint64_t epoch = 1) {
    RestoredGeneration restored;
    state.scribble();
    const Status status = store->restore(&restored);
    EXPECT_TRUE(status.ok()) << status.to_string();
    EXPECT_EQ(restored.position.epoch, epoch);
    EXPECT_EQ(restored.position.attempt, attempt);
    EXPECT_EQ(restored.position.update, attempt / 2);
    EXPECT_EQ(restored.position.skips, attempt / 3);
    EXPECT_EQ(restored.memory, is_first() ? memory_of(attempt) : "");
    EXPECT_EQ(state.values(), state.expected(attempt)) << "rank " << number();
    return restored;
  }
  static Bytes memory_of(std::uint64_t attempt) { return "memory as of " + std::to_string(attempt); }
};

inline void all_kinds(RankState& state) { state.add_all_kinds(); }
inline void small_model(RankState& state) {
  state.add("weight", DType::kFloat32, {6}, Held::kReplicated);
  state.add("moment", DType::kFloat32, {6}, Held::kReplicated);
  state.add("own", DType::kFloat32, {4}, Held::kPerRank);
  state.add_bytes("rng", Held::kPerRank);
}

struct World {
  std::string folder;
  int ranks = 1;
  CheckpointOptions options = {.interval_attempts = 1, .keep = 3};
  std::function<void(RankState&)> declare = small_model;
  std::function<FileSystem&(int rank)> files = [](int) -> FileSystem& { return real_file_system(); };

  // On each rank with a store of its own, as one start of a run.
  void run(const std::function<void(Rank&)>& body) const {
    start([&](Rank& rank, const Status& created) {
      ASSERT_TRUE(created.ok()) << created.to_string();
      body(rank);
    });
  }
  // The same, whether or not create() went well.
  void start(const std::function<void(Rank&, const Status&)>& body) const {
    ThreadGroup(ranks, std::chrono::seconds(20)).run([&](Collective& collective) {
      RankState state(collective.rank(), collective.size());
      declare(state);
      Rank rank{collective, state, nullptr};
      const Status created =
          CheckpointStore::create(collective, files(collective.rank()), collective.rank() == 0 ? folder : "",
                                  options, state.state(), &rank.store);
      body(rank, created);
    });
  }
};

inline std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  EXPECT_TRUE(real_file_system().list(folder, &names).ok()) << folder;
  return names;
}

inline std::vector<std::string> names_of(const std::vector<GenerationId>& ids) {
  std::vector<std::string> names;
  for (const GenerationId& id : ids) names.push_back(id.name());
  return names;
}

}  // namespace holdfast
