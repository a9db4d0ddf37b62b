#include "holdfast/training_state.h"

#include <gtest/gtest.h>

#include <functional>
#include <limits>

namespace holdfast {
namespace {

float memory[6] = {};

StateTensor tensor(const std::string& name) { return {.name = name, .data = memory, .shape = {2, 3}}; }

StateBytes bytes(const std::string& name) {
  return {.name = name, .save = [] { return Bytes(); }, .load = [](const Bytes&) { return Status(); }};
}

Status check(const StateTensor& one) {
  TrainingState state;
  state.add(one);
  return state.check();
}

void expect_refused(const Status& status, const std::string& why) {
  EXPECT_EQ(status.code(), StatusCode::kUsage) << why;
  EXPECT_NE(status.message().find(why), std::string::npos) << status.message();
}

TEST(TrainingState, CountsElementsAndBytes) {
  StateTensor one = tensor("a");
  one.dtype = DType::kComplex128;
  EXPECT_EQ(one.elements(), 6);
  EXPECT_EQ(one.bytes(), 96);
  EXPECT_EQ(one.view().element_count, 6);
  EXPECT_EQ(one.view().data, memory);
  EXPECT_EQ(one.view().dtype, DType::kComplex128);
  one.shape = {};
  EXPECT_EQ(one.elements(), 1);
  one.shape = {4, 0};
  EXPECT_EQ(one.bytes(), 0);
}

TEST(TrainingState, ThatIsSoundIsTaken) {
  TrainingState state;
  EXPECT_TRUE(state.empty());
  EXPECT_TRUE(state.check().ok());
  state.add(tensor("optimizer/conv1.weight/exp_avg"));
  state.add(tensor("gewicht \xc3\xa4"));
  state.add(bytes("loader"));
  StateTensor shard = tensor("shard");
  shard.held = Held::kSharded;
  shard.shard_offset = 6;
  shard.shard_total = 12;
  state.add(shard);
  StateTensor none = tensor("none");
  none.data = nullptr;
  none.shape = {0};
  state.add(none);
  EXPECT_FALSE(state.empty());
  EXPECT_TRUE(state.check().ok()) << state.check().message();
}

TEST(TrainingState, NamesThatCannotBeAreRefused) {
  expect_refused(check(tensor("")), "is empty");
  expect_refused(check(tensor("a\nb")), "\"a\\x0ab\" is no printable UTF-8");
  expect_refused(check(tensor("\xff")), "no printable UTF-8");
  expect_refused(check(tensor("__metadata__")), "belongs to the format");
  expect_refused(check(tensor(std::string(4097, 'x'))), "longer than 4096");
  EXPECT_TRUE(check(tensor(std::string(4096, 'x'))).ok());
}

TEST(TrainingState, NamesThatAreTakenTwiceAreRefused) {
  TrainingState tensors;
  tensors.add(tensor("a"));
  tensors.add(tensor("b"));
  tensors.add(tensor("a"));
  expect_refused(tensors.check(), "\"a\" is there twice");
  TrainingState mixed;
  mixed.add(tensor("a"));
  mixed.add(bytes("a"));
  expect_refused(mixed.check(), "\"a\" is there twice");
}

TEST(TrainingState, TensorsThatCannotBeAreRefused) {
  const auto with = [](const std::function<void(StateTensor*)>& change) {
    StateTensor one = tensor("t");
    change(&one);
    return check(one);
  };
  expect_refused(with([](StateTensor* t) { t->dtype = static_cast<DType>(99); }),
                 "\"t\" has an unknown dtype");
  expect_refused(with([](StateTensor* t) { t->data = nullptr; }), "no memory");
  expect_refused(with([](StateTensor* t) { t->shape = {-1}; }), "negative or overflows");
  expect_refused(with([](StateTensor* t) { t->shape = {0, -1}; }), "negative or overflows");
  expect_refused(with([](StateTensor* t) { t->shape = {1ll << 61, 1}; }), "negative or overflows");
  expect_refused(with([](StateTensor* t) { t->shape = {1ll << 32, 1ll << 32}; }), "negative or overflows");
  expect_refused(with([](StateTensor* t) { t->shape.assign(64, 1); }), "too many dimensions");
  EXPECT_TRUE(with([](StateTensor* t) { t->shape.assign(63, 1); }).ok());
}

TEST(TrainingState, ShardsOutsideOfTheirArrayAreRefused) {
  const auto at = [](std::int64_t offset, std::int64_t total) {
    StateTensor one = tensor("t");
    one.held = Held::kSharded;
    one.shard_offset = offset;
    one.shard_total = total;
    return check(one);
  };
  EXPECT_TRUE(at(0, 6).ok());
  EXPECT_TRUE(at(4, 10).ok());
  expect_refused(at(-1, 10), "outside of its array");
  expect_refused(at(5, 10), "outside of its array");
  expect_refused(at(11, 10), "outside of its array");
  expect_refused(at(0, -1), "outside of its array");
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  expect_refused(at(kMost, kMost), "outside of its array");
  expect_refused(at(0, kMost), "overflows");
}

TEST(TrainingState, BytesThatCannotBeAreRefused) {
  TrainingState sharded;
  StateBytes one = bytes("b");
  one.held = Held::kSharded;
  sharded.add(one);
  expect_refused(sharded.check(), "\"b\" is sharded");
  TrainingState mute;
  one = bytes("b");
  one.save = nullptr;
  mute.add(one);
  expect_refused(mute.check(), "lacks its save or load");
}

}  // namespace
}  // namespace holdfast
