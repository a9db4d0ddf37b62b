#include "retention.h"

#include <gtest/gtest.h>

namespace holdfast {
namespace {

std::vector<StoredGeneration> generations(std::initializer_list<std::uint64_t> attempts,
                                          std::uint64_t bytes = 10) {
  std::vector<StoredGeneration> stored;
  for (const std::uint64_t attempt : attempts) stored.push_back({{1, attempt}, bytes});
  return stored;
}

std::vector<std::uint64_t> removed(const std::vector<StoredGeneration>& stored,
                                   const CheckpointOptions& options) {
  std::vector<std::uint64_t> attempts;
  for (const GenerationId& id : generations_to_remove(stored, options)) attempts.push_back(id.attempt);
  return attempts;
}

using Attempts = std::vector<std::uint64_t>;

TEST(Retention, KeepsTheNewest) {
  const CheckpointOptions three = {.interval_attempts = 100, .keep = 3};
  EXPECT_EQ(removed(generations({}), three), Attempts{});
  EXPECT_EQ(removed(generations({100, 200, 300}), three), Attempts{});
  EXPECT_EQ(removed(generations({100, 200, 300, 400}), three), Attempts{100});
  EXPECT_EQ(removed(generations({100, 200, 300, 400, 500}), three), (Attempts{100, 200}));
}

TEST(Retention, NeverRemovesTheLastOne) {
  EXPECT_EQ(removed(generations({100}), {.interval_attempts = 100, .keep = 1, .quota_bytes = 1}), Attempts{});
  EXPECT_EQ(removed(generations({100}), {.interval_attempts = 100, .keep = 0}), Attempts{});
}

TEST(Retention, KeepsOneInMByItsAttemptAlone) {
  const CheckpointOptions options = {.interval_attempts = 100, .keep = 1, .keep_every = 3};
  EXPECT_EQ(removed(generations({100, 200, 300, 400, 500}), options), (Attempts{100, 200, 400}));
  // The same ones if 200 and 500 were refused, or a restart forgot them.
  EXPECT_EQ(removed(generations({100, 300, 400, 600, 700}), options), (Attempts{100, 400}));
}

TEST(Retention, AnEpochThatIsNewerCountsAsNewerWhateverItsAttempt) {
  const std::vector<StoredGeneration> stored = {{{1, 700}, 1}, {{1, 800}, 1}, {{2, 300}, 1}};
  EXPECT_EQ(removed(stored, {.interval_attempts = 100, .keep = 2}), Attempts{700});
}

TEST(Retention, TheQuotaTakesTheOldestAndLeavesTwo) {
  EXPECT_EQ(removed(generations({100, 200, 300}), {.interval_attempts = 100, .keep = 3, .quota_bytes = 30}),
            Attempts{});
  EXPECT_EQ(removed(generations({100, 200, 300}), {.interval_attempts = 100, .keep = 3, .quota_bytes = 29}),
            Attempts{100});
  EXPECT_EQ(removed(generations({100, 200, 300}), {.interval_attempts = 100, .keep = 3, .quota_bytes = 1}),
            Attempts{100});
  // What is kept for good goes too.
  EXPECT_EQ(removed(generations({100, 200, 300, 400}),
                    {.interval_attempts = 100, .keep = 2, .keep_every = 1, .quota_bytes = 25}),
            (Attempts{100, 200}));
}

TEST(Retention, RefusesWhatDoesNotFitBesideTheNewestOlderOne) {
  const CheckpointOptions options = {.interval_attempts = 100, .keep = 3, .quota_bytes = 25};
  EXPECT_EQ(quota_refusal(generations({100, 200}), 15, options), "");
  EXPECT_EQ(quota_refusal(generations({100, 200}), 16, options),
            "its 16 bytes and the 10 of e0001-a0000000200, which stays until a newer one is on disk, are "
            "more than the "
            "quota of 25");
  EXPECT_EQ(quota_refusal({}, 25, options), "");
  EXPECT_EQ(quota_refusal({}, 26, options), "its 26 bytes are more than the quota of 25");
  EXPECT_EQ(quota_refusal(generations({100}, ~std::uint64_t{0}), 25, options).empty(), false);
  EXPECT_EQ(quota_refusal(generations({100, 200}), 1000, {.keep = 1}), "");
}

}  // namespace
}  // namespace holdfast
