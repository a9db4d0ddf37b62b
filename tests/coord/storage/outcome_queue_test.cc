#include "holdfast/coord/storage/outcome_queue.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

namespace holdfast {
namespace {

TEST(OutcomeQueueTest, GivesEachOnceAndInOrder) {
  OutcomeQueue<std::unique_ptr<int>> queue(2);
  EXPECT_TRUE(queue.take().empty());
  for (int i = 0; i < 5; ++i) queue.put(std::make_unique<int>(i));
  const auto taken = queue.take();
  ASSERT_EQ(taken.size(), 5u);
  for (int i = 0; i < 5; ++i) EXPECT_EQ(*taken[static_cast<std::size_t>(i)], i);
  EXPECT_TRUE(queue.take().empty());
  queue.put(std::make_unique<int>(7));
  EXPECT_EQ(queue.take().size(), 1u);
}

// What is put while it is being looked into is seen by a later call: nothing is lost, and nothing is kept
// back for want of a further put().
TEST(OutcomeQueueTest, LosesNothingThatIsPutWhileItIsAsked) {
  constexpr int kEach = 20'000;
  OutcomeQueue<int> queue(1);
  std::vector<int> taken, expected;
  std::atomic<bool> done{false};
  std::jthread writer([&queue, &done] {
    for (int i = 0; i < kEach; ++i) queue.put(i);
    done = true;
  });
  for (bool last = false; !last;) {
    last = done;
    for (const int outcome : queue.take()) taken.push_back(outcome);
  }
  for (int i = 0; i < kEach; ++i) expected.push_back(i);
  EXPECT_EQ(taken, expected);
}

}  // namespace
}  // namespace holdfast
