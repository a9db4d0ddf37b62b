// Which few of many are enough for a failure.
#include "holdfast/minimal_subset.h"

#include <gtest/gtest.h>
#include <malloc.h>

#include <algorithm>
#include <set>

namespace holdfast {
namespace {

using Members = std::vector<std::size_t>;

bool holds(const Members& members, std::size_t one) { return std::ranges::count(members, one) == 1; }

// All of `culprits` are needed, together.
MinimalSubset find(std::size_t count, const Members& culprits, std::uint64_t most_tests = 1000000) {
  std::set<Members> asked;
  const MinimalSubset found = minimal_subset(count, most_tests, [&](const Members& members) {
    EXPECT_TRUE(std::ranges::is_sorted(members));
    EXPECT_TRUE(asked.insert(members).second) << "asked twice";
    return std::ranges::all_of(culprits, [&](std::size_t one) { return holds(members, one); });
  });
  EXPECT_EQ(found.tests, asked.size());
  return found;
}

TEST(MinimalSubset, OneCulpritIsFoundWhereverItIs) {
  for (std::size_t at = 0; at < 64; ++at) {
    const MinimalSubset found = find(64, {at});
    EXPECT_EQ(found.members, Members{at});
    EXPECT_TRUE(found.is_minimal);
    EXPECT_LE(found.tests, 13u);
  }
}

TEST(MinimalSubset, CulpritsThatAreOnlyBadTogetherAreFoundTogether) {
  EXPECT_EQ(find(64, {3, 60}).members, (Members{3, 60}));
  EXPECT_EQ(find(64, {31, 32}).members, (Members{31, 32}));
  EXPECT_EQ(find(65, {0, 33, 64}).members, (Members{0, 33, 64}));
  EXPECT_TRUE(find(65, {0, 33, 64}).is_minimal);
}

TEST(MinimalSubset, WhereNoneAreNeededNoneAreTold) {
  const MinimalSubset found = find(64, {});
  EXPECT_EQ(found.members, Members{});
  EXPECT_TRUE(found.is_minimal);
  EXPECT_EQ(found.tests, 1u);
}

TEST(MinimalSubset, WhereAllAreNeededAllAreTold) {
  EXPECT_EQ(find(5, {0, 1, 2, 3, 4}).members, (Members{0, 1, 2, 3, 4}));
  EXPECT_EQ(find(1, {0}).members, Members{0});
  EXPECT_EQ(find(0, {}).members, Members{});
}

TEST(MinimalSubset, EitherOfTwoCulpritsIsEnough) {
  const MinimalSubset found = minimal_subset(
      32, 1000, [](const Members& members) { return holds(members, 5) || holds(members, 20); });
  EXPECT_EQ(found.members, Members{5});
  EXPECT_TRUE(found.is_minimal);
}

// An odd number of members: taking away one of them passes, and so does nearly everything.
TEST(MinimalSubset, WhatIsFoundIsEnoughAndNoOneCanBeTakenAway) {
  const auto fails = [](const Members& members) { return members.size() % 3 == 2 && holds(members, 7); };
  const MinimalSubset found = minimal_subset(20, 100000, fails);
  ASSERT_TRUE(fails(found.members));
  for (std::size_t i = 0; i < found.members.size(); ++i) {
    Members without = found.members;
    without.erase(without.begin() + static_cast<std::ptrdiff_t>(i));
    EXPECT_FALSE(fails(without));
  }
}

TEST(MinimalSubset, TheNumberOfTestsIsBoundedAndWhatItEndsWithIsStillEnough) {
  const MinimalSubset found = find(64, {3, 60}, 7);
  EXPECT_EQ(found.tests, 7u);
  EXPECT_FALSE(found.is_minimal);
  EXPECT_TRUE(holds(found.members, 3) && holds(found.members, 60));
  EXPECT_EQ(find(64, {3, 60}, 0).members.size(), 64u);
}

// Two halves of 64 Ki members together are needed, so that each subset that is asked for is large.
TEST(MinimalSubset, WhatIsKnownTakesLittleMemory) {
  constexpr std::size_t kCount = 1 << 16;
  const auto used = [] {
    const struct mallinfo2 info = mallinfo2();
    return info.uordblks + info.hblkhd;
  };
  std::size_t asked = 0;
  std::size_t at_first = 0;
  std::size_t most = 0;
  const MinimalSubset found = minimal_subset(kCount, 200, [&](const Members& members) {
    if (++asked == 2) at_first = used();
    most = std::max(most, used());
    return members.size() == kCount;
  });
  EXPECT_EQ(found.tests, 200u);
  EXPECT_LT(most, at_first + (8u << 20)) << "one subset has up to 512 KiB";
}

TEST(MinimalSubset, NoAnswerEndsTheSearch) {
  int asked = 0;
  const MinimalSubset found = minimal_subset(64, 1000, [&](const Members&) -> std::optional<bool> {
    if (++asked == 3) return std::nullopt;
    return false;
  });
  EXPECT_EQ(asked, 3);
  EXPECT_EQ(found.members.size(), 64u);
  EXPECT_FALSE(found.is_minimal);
}

}  // namespace
}  // namespace holdfast
