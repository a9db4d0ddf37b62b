// Field case 22 again: the run dies, or storage fails, at any call while generation 3 is made. Whatever is
// restored afterwards is whole, and what was said to be published is there.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>

#include "coord/storage/faulty_file_system.h"
#include "store_world.h"

namespace holdfast {
namespace {

namespace fs = std::filesystem;
using Names = std::vector<std::string>;

void tiny_model(RankState& state) {
  state.add("w", DType::kFloat32, {2}, Held::kReplicated);
  state.add("o", DType::kFloat16, {2}, Held::kPerRank);
  state.add_bytes("b", Held::kPerRank);
}

class Case22DeathWhileWriting : public testing::Test {
 protected:
  Case22DeathWhileWriting() { start_over(2); }
  void start_over(int ranks) {
    fs::remove_all(world_.folder);
    world_.ranks = ranks;
    world_.run([](Rank& rank) {
      rank.publish(1);
      rank.publish(2);
    });
  }
  // A run that makes generation 3 on `files`, which may let it down. Whether it said that 3 is published.
  bool make_3(FileSystem& files) {
    std::atomic<bool> published = false;
    World world = world_;
    world.files = [&](int) -> FileSystem& { return files; };
    world.start([&](Rank& rank, const Status& created) {
      if (!created.ok()) return;
      if (rank.publish(3).published) published = true;
    });
    return published;
  }
  // On a sound disk.
  void expect_whole(bool must_be_3, const std::string& when) {
    SCOPED_TRACE(when);
    std::atomic<std::uint64_t> restored_attempt = 0;
    world_.run([&](Rank& rank) {
      RestoredGeneration restored;
      rank.state.scribble();
      const Status status = rank.store->restore(&restored);
      ASSERT_TRUE(status.ok()) << status.to_string();
      EXPECT_EQ(rank.state.values(), rank.state.expected(restored.position.attempt));
      if (rank.is_first()) restored_attempt = restored.position.attempt;
      // And the run goes on.
      rank.wait_for_all();
      EXPECT_EQ(rank.publish(4, 2).published, rank.is_first());
      rank.expect_restored(4, 2);
    });
    EXPECT_TRUE(restored_attempt == 3 || (restored_attempt == 2 && !must_be_3)) << restored_attempt;
    for (const std::string& name : names_in(world_.folder)) EXPECT_TRUE(name.starts_with("e000")) << name;
  }

  MemoryDir dir_;
  // Two are kept, so that a removal is among the calls.
  World world_ = {
      .folder = dir_ / "checkpoints", .options = {.interval_attempts = 1, .keep = 2}, .declare = tiny_model};
};

std::string describe(const std::string& what, int n, const FaultyFileSystem& files) {
  const std::vector<std::string> log = files.log();
  const auto at = static_cast<std::size_t>(n) - 1;
  return what + " at call " + std::to_string(n) + ", " + (at < log.size() ? log[at] : "which was not made");
}

TEST_F(Case22DeathWhileWriting, AtEveryCallAndWithThePowerCut) {
  FaultyFileSystem sound;
  ASSERT_TRUE(make_3(sound));
  const int calls = sound.calls() + 3;  // ranks race: some runs make a few more
  ASSERT_GT(calls, 40);
  for (int n = 1; n <= calls && !HasFailure(); ++n) {
    for (const When when : {When::kBefore, When::kTorn, When::kAfter}) {
      for (const bool power_cut : {false, true}) {
        start_over(2);
        FaultyFileSystem files;
        files.die_at(n, when);
        const bool published = make_3(files);
        ASSERT_TRUE(!power_cut || files.cut_power().ok());
        expect_whole(published, describe(power_cut ? "power cut" : "death", n, files));
      }
    }
  }
}

TEST_F(Case22DeathWhileWriting, AFailureAtEveryCallIsSaidAndTheRunGoesOn) {
  FaultyFileSystem sound;
  ASSERT_TRUE(make_3(sound));
  for (int n = 1; n <= sound.calls() && !HasFailure(); ++n) {
    start_over(2);
    FaultyFileSystem files;
    files.fail_at(n);
    World world = world_;
    world.files = [&](int) -> FileSystem& { return files; };
    bool published = false;
    world.start([&](Rank& rank, const Status& created) {
      if (!created.ok()) {
        EXPECT_EQ(created.code(), StatusCode::kUsage) << created.to_string();
        return;
      }
      const CheckpointOutcome outcome = rank.publish(3);
      if (!rank.is_first()) return;
      published = outcome.published;
      EXPECT_TRUE(published || !outcome.reason.empty());
    });
    expect_whole(published, describe("failure", n, files));
  }
}

TEST_F(Case22DeathWhileWriting, ForRealAtEveryCall) {
  start_over(1);
  FaultyFileSystem sound;
  ASSERT_TRUE(make_3(sound));
  for (int n = 1; n <= sound.calls() && !HasFailure(); ++n) {
    start_over(1);
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      FaultyFileSystem files;
      files.exit_at(n, n % 2 == 0 ? When::kTorn : When::kAfter);
      make_3(files);
      _exit(0);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 137) << n;
    expect_whole(false, "exit at call " + std::to_string(n));
  }
}

}  // namespace
}  // namespace holdfast
