#include "holdfast/coord/state.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include "coord/file_size_limit.h"
#include "coord/temp_dir.h"
#include "holdfast/coord/state.pb.h"

namespace holdfast {
namespace {

std::ptrdiff_t files_in(const std::string& path) {
  return std::distance(std::filesystem::directory_iterator(path), {});
}

RunState sample_state() {
  RunState state;
  state.set_epoch(3);
  state.set_attempt(1234);
  state.set_total_skips(17);
  state.add_recent_skips()->set_tensor("conv1.\xff");
  return state;
}

std::string refused(const std::string& run_dir) {
  RunState state = sample_state();
  const Status status = read_state(run_dir, &state);
  EXPECT_EQ(status.code(), StatusCode::kUsage);
  EXPECT_EQ(state.SerializeAsString(), RunState().SerializeAsString()) << "a part of a refused state";
  EXPECT_NE(status.message().find(run_dir + "/state"), std::string::npos) << status.message();
  EXPECT_NE(status.message().find("another folder"), std::string::npos) << status.message();
  return status.message();
}

TEST(State, ReadsBackAsItWasWritten) {
  const TempDir temp;
  ASSERT_TRUE(write_state(temp.path(), sample_state()).ok());
  RunState state;
  ASSERT_TRUE(read_state(temp.path(), &state).ok());
  EXPECT_EQ(state.SerializeAsString(), sample_state().SerializeAsString());
}

TEST(State, IsForItsOwnerOnlyAndLeavesNoOtherFile) {
  const TempDir temp;
  const mode_t before = umask(0);
  ASSERT_TRUE(write_state(temp.path(), sample_state()).ok());
  umask(before);
  struct stat info = {};
  ASSERT_EQ(stat((temp / "state").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  EXPECT_EQ(files_in(temp.path()), 1);
}

RunState state_of(std::uint64_t epoch, const std::string& holder) {
  RunState state = sample_state();
  state.set_epoch(epoch);
  state.set_holder(holder);
  return state;
}

TEST(State, OfARunThatWasTakenOverIsNotWritten) {
  const TempDir temp;
  ASSERT_TRUE(write_state(temp.path(), state_of(1, "old")).ok());
  EXPECT_EQ(taken_over_by(temp.path(), state_of(1, "old")), "");
  ASSERT_TRUE(claim_state(temp.path(), state_of(2, "n\x1b")).ok());
  EXPECT_EQ(taken_over_by(temp.path(), state_of(1, "old")), "n\\x1b, epoch 2");
  EXPECT_EQ(taken_over_by(temp.path(), state_of(2, "other")), "n\\x1b, epoch 2");
  // A run that went back to a checkpoint counted its own epoch up; that gives it no right to the folder.
  RunState went_back = state_of(3, "old");
  went_back.set_claimed_epoch(1);
  EXPECT_EQ(taken_over_by(temp.path(), went_back), "n\\x1b, epoch 2");
  EXPECT_EQ(taken_over_by(temp.path(), state_of(3, "other")), "") << "one that is about to claim it";
  const std::string before = read_file(temp / "state");
  EXPECT_EQ(write_state(temp.path(), went_back).code(), StatusCode::kRanksDisagree);
  EXPECT_EQ(write_state(temp.path(), state_of(1, "old")).code(), StatusCode::kRanksDisagree);
  EXPECT_EQ(claim_state(temp.path(), state_of(2, "other")).code(), StatusCode::kRanksDisagree);
  EXPECT_EQ(read_file(temp / "state"), before);
  EXPECT_EQ(files_in(temp.path()), 1);
}

// The file with which a writer would replace the state is all that one needs that was stopped after its last
// look.
TEST(State, AClaimTakesTheFilesOfStoppedWritersAway) {
  const TempDir temp;
  ASSERT_TRUE(write_state(temp.path(), state_of(1, "old")).ok());
  write_file(temp / "state.new.0123456789abcdef", "ready to be renamed");
  write_file(temp / "events.jsonl", "");
  ASSERT_TRUE(claim_state(temp.path(), state_of(2, "new")).ok());
  EXPECT_EQ(files_in(temp.path()), 2);
}

TEST(State, CutOffAnywhereItIsRefused) {
  const TempDir temp;
  ASSERT_TRUE(write_state(temp.path(), sample_state()).ok());
  const std::string whole = read_file(temp / "state");
  for (std::size_t size = 0; size < whole.size(); ++size) {
    write_file(temp / "state", whole.substr(0, size));
    EXPECT_NE(refused(temp.path()).find("damaged"), std::string::npos) << size;
  }
}

TEST(State, WithAnyBitChangedItIsRefused) {
  const TempDir temp;
  ASSERT_TRUE(write_state(temp.path(), sample_state()).ok());
  const std::string whole = read_file(temp / "state");
  for (std::size_t bit = 0; bit < 8 * whole.size(); ++bit) {
    std::string damaged = whole;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1 << (bit % 8)));
    write_file(temp / "state", damaged);
    refused(temp.path());
  }
}

TEST(State, WithBytesAddedItIsRefused) {
  const TempDir temp;
  ASSERT_TRUE(write_state(temp.path(), sample_state()).ok());
  const std::string whole = read_file(temp / "state");
  for (const std::string& more :
       {std::string(1, '\0'), std::string("\x08\x01"), whole, std::string("\x50\x01")}) {
    write_file(temp / "state", whole + more);
    refused(temp.path());
  }
}

TEST(State, OfAnotherVersionItIsRefusedSayingWhich) {
  const TempDir temp;
  StateFile file;
  file.set_version(kStateVersion + 1);
  file.set_payload("whatever a later program writes");
  write_file(temp / "state", file.SerializeAsString());
  EXPECT_NE(refused(temp.path()).find("version 2"), std::string::npos);
}

TEST(State, NumbersThatAreUsedUncheckedAreCheckedHere) {
  const TempDir temp;
  RunState bad_stage = sample_state();
  bad_stage.mutable_recent_skips(0)->set_stage(6);
  ASSERT_TRUE(write_state(temp.path(), bad_stage).ok());
  refused(temp.path());
  RunState bad_scale = sample_state();
  bad_scale.mutable_loss_scale()->set_scale(-1);
  ASSERT_TRUE(write_state(temp.path(), bad_scale).ok());
  refused(temp.path());
}

TEST(State, WhatIsNoFileIsRefused) {
  const TempDir temp;
  EXPECT_NE(refused(temp.path()).find("No such file"), std::string::npos);
  ASSERT_EQ(mkdir((temp / "state").c_str(), 0700), 0);
  refused(temp.path());
  ASSERT_EQ(rmdir((temp / "state").c_str()), 0);
  ASSERT_EQ(mkfifo((temp / "state").c_str(), 0600), 0);  // must not wait for a writer
  refused(temp.path());
}

TEST(State, OnAFullDiskTheOldOneStays) {
  const TempDir temp;
  ASSERT_TRUE(write_state(temp.path(), sample_state()).ok());
  const std::string before = read_file(temp / "state");
  RunState more = sample_state();
  more.set_holder(std::string(4096, 'x'));
  {
    const FileSizeLimit full(1024);
    const Status status = write_state(temp.path(), more);
    EXPECT_EQ(status.code(), StatusCode::kInternal);
    EXPECT_NE(status.message().find(temp / "state"), std::string::npos) << status.message();
  }
  EXPECT_EQ(read_file(temp / "state"), before);
  EXPECT_EQ(files_in(temp.path()), 1);
}

}  // namespace
}  // namespace holdfast
