#include "holdfast/coord/rate_window.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace holdfast {
namespace {

constexpr std::size_t kUnbounded = 1'000'000;

TEST(RateWindow, HoldsTheLastAttemptsAndNoOthers) {
  RateWindow window(3, kUnbounded);
  EXPECT_EQ(window.attempts(), 0u);
  window.advance(1);
  window.add_skip(1);
  EXPECT_EQ(window.skips(), 1u);
  EXPECT_EQ(window.attempts(), 1u);
  window.advance(2);
  window.advance(3);
  EXPECT_EQ(window.skips(), 1u);
  EXPECT_TRUE(window.holds(1));
  window.advance(4);
  EXPECT_EQ(window.skips(), 0u);
  EXPECT_EQ(window.attempts(), 3u);
  EXPECT_FALSE(window.holds(1));
  EXPECT_TRUE(window.holds(2));
}

TEST(RateWindow, ASkipThatIsChargedLateCountsWhereItWas) {
  RateWindow window(4, kUnbounded);
  window.advance(10);
  window.add_skip(6);  // too old
  window.add_skip(7);
  window.add_skip(9);
  EXPECT_EQ(window.skips(), 2u);
  window.advance(11);
  EXPECT_EQ(window.skips(), 1u);
}

TEST(RateWindow, BeyondItsMemoryItKnowsThatThereAreMany) {
  RateWindow window(1000, 5);
  for (std::uint64_t attempt = 1; attempt <= 100; ++attempt) {
    window.advance(attempt);
    window.add_skip(attempt);
  }
  EXPECT_EQ(window.skips(), 5u);
  window.advance(1097);  // 98 to 1097
  EXPECT_EQ(window.skips(), 3u);
}

TEST(RateWindow, EqualsACountOverAllAttempts) {
  std::mt19937_64 random(1);
  for (int trial = 0; trial < 200; ++trial) {
    const std::uint64_t width = 1 + random() % 40;
    const std::size_t most = 1 + random() % 60;
    const double rate = static_cast<double>(random() % 11) / 10;
    RateWindow window(width, most);
    std::vector<bool> skipped;
    for (std::uint64_t attempt = 1; attempt <= 200; ++attempt) {
      window.advance(attempt);
      skipped.push_back(std::bernoulli_distribution(rate)(random));
      if (skipped.back()) window.add_skip(attempt);
      const std::uint64_t held = std::min(width, attempt);
      const auto counted = std::count(skipped.end() - static_cast<std::ptrdiff_t>(held), skipped.end(), true);
      ASSERT_EQ(window.skips(), std::min<std::uint64_t>(static_cast<std::uint64_t>(counted), most));
      ASSERT_EQ(window.attempts(), held);
    }
  }
}

}  // namespace
}  // namespace holdfast
