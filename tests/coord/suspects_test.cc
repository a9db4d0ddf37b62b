#include "holdfast/coord/suspects.h"

#include <gtest/gtest.h>

namespace holdfast {
namespace {

using Devices = std::vector<std::string>;

void count(Suspects& suspects, const Devices& devices, int times) {
  for (int i = 0; i < times; ++i) suspects.count(devices);
}

TEST(Suspects, ADeviceIsSuspectFromTheThresholdOn) {
  for (const std::uint64_t threshold : {1u, 3u, 10u}) {
    Suspects suspects(threshold);
    for (std::uint64_t incidents = 1; incidents <= 2 * threshold; ++incidents) {
      suspects.count({"a/slot 0"});
      EXPECT_EQ(suspects.is_suspect("a/slot 0"), incidents >= threshold) << incidents << " of " << threshold;
      EXPECT_FALSE(suspects.is_suspect("a/slot 1"));
    }
  }
}

TEST(Suspects, ADeviceThatWasNeverAnOriginIsNot) {
  Suspects suspects(1);
  EXPECT_FALSE(suspects.is_suspect("a"));
  EXPECT_FALSE(suspects.is_suspect(""));
}

TEST(Suspects, SeveralDevicesAtOncePointAtNoneOfThem) {
  Suspects suspects(1);
  count(suspects, {"a", "b"}, 100);
  count(suspects, {"b", "a", "c"}, 100);
  for (const char* device : {"a", "b", "c"}) EXPECT_FALSE(suspects.is_suspect(device)) << device;
  // Nor do they take anything from what points at one.
  suspects.count({"a"});
  EXPECT_TRUE(suspects.is_suspect("a"));
}

TEST(Suspects, RanksThatShareADeviceAreOneOriginAndOneIncident) {
  Suspects suspects(3);
  count(suspects, {"gpu", "gpu", "gpu"}, 2);
  EXPECT_FALSE(suspects.is_suspect("gpu"));
  suspects.count({"gpu", "gpu"});
  EXPECT_TRUE(suspects.is_suspect("gpu"));
}

TEST(Suspects, AnIncidentWithoutADeviceCountsForNothing) {
  Suspects suspects(1);
  count(suspects, {}, 50);
  suspects.count({"a"});
  EXPECT_TRUE(suspects.is_suspect("a"));
}

// Trouble that goes round the devices is the data's, or the model's.
TEST(Suspects, NoDeviceIsSuspectWithLessThanHalfOfWhatPointsAtOne) {
  Suspects suspects(3);
  for (int round = 0; round < 20; ++round) {
    for (const char* device : {"a", "b", "c", "d"}) suspects.count({device});
  }
  for (const char* device : {"a", "b", "c", "d"}) EXPECT_FALSE(suspects.is_suspect(device)) << device;
  count(suspects, {"a"}, 39);
  EXPECT_FALSE(suspects.is_suspect("a"));  // 59 of 119
  suspects.count({"a"});
  EXPECT_TRUE(suspects.is_suspect("a"));  // 60 of 120
  EXPECT_FALSE(suspects.is_suspect("b"));
  suspects.count({"b"});
  EXPECT_FALSE(suspects.is_suspect("a"));  // 60 of 121
}

TEST(Suspects, AnIncidentThatIsTakenBackNeverWas) {
  Suspects suspects(2);
  count(suspects, {"a"}, 2);
  suspects.take_back("a");
  EXPECT_FALSE(suspects.is_suspect("a"));
  EXPECT_EQ(suspects.incidents().at("a"), 1u);
  EXPECT_EQ(suspects.single_origin(), 1u);
  suspects.take_back("a");
  suspects.take_back("a");
  suspects.take_back("never seen");
  EXPECT_TRUE(suspects.incidents().empty());
  EXPECT_EQ(suspects.single_origin(), 0u);
  count(suspects, {"a"}, 2);
  EXPECT_TRUE(suspects.is_suspect("a"));
}

}  // namespace
}  // namespace holdfast
