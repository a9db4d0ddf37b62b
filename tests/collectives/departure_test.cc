#include "holdfast/collectives/departure.h"

#include <gtest/gtest.h>

namespace holdfast {
namespace {

RankIdentity rank(int r) { return {r, "node" + std::to_string(r), 100 + r}; }

TEST(Departure, NamesWhoIsMissingHowAndWhereItWasLastSeen) {
  Departure departure;
  departure.missing = {{rank(1), Absence::kDied, Place{2, 12, 4, Phase::kDecide}},
                       {rank(2), Absence::kSilent, Place{2, 11, 0, Phase::kBegin}},
                       {rank(3), Absence::kStuck, Place{1, 0, 9, Phase::kObserve}},
                       {rank(4), Absence::kLeft, Place{2, 12, 5, Phase::kOutside}}};
  departure.survivors = {{rank(0), Place{2, 12, 4, Phase::kUpdate}},
                         {rank(5), Place{2, 12, 4, Phase::kDecide}}};
  EXPECT_EQ(departure.describe(),
            "rank 1 (host node1, pid 101) died at attempt 12 of epoch 2, phase decide; "
            "rank 2 (host node2, pid 102) is silent at attempt 11 of epoch 2, phase begin; "
            "rank 3 (host node3, pid 103) is stuck at attempt 0 of epoch 1, phase observe; "
            "rank 4 (host node4, pid 104) left at attempt 12 of epoch 2, phase outside. "
            "2 left behind, rank 0 (host node0, pid 100) at attempt 12 of epoch 2, phase update");
}

TEST(Departure, ARankThatNeverSaidWhereItWasHasNoPlace) {
  Departure departure;
  departure.missing = {{rank(7), Absence::kSilent, std::nullopt}};
  EXPECT_EQ(departure.describe(), "rank 7 (host node7, pid 107) is silent");
}

TEST(Departure, NamesEightAndCountsTheRest) {
  for (const int missing : {8, 9, 1000}) {
    Departure departure;
    for (int r = 0; r < missing; ++r) departure.missing.push_back({rank(r), Absence::kDied, std::nullopt});
    const std::string text = departure.describe();
    EXPECT_NE(text.find("rank 7 "), std::string::npos);
    EXPECT_EQ(text.find("rank 8 "), std::string::npos);
    if (missing == 8) {
      EXPECT_EQ(text.find("more"), std::string::npos);
    } else {
      EXPECT_TRUE(text.ends_with("; and " + std::to_string(missing - 8) + " more")) << text;
    }
  }
}

TEST(Departure, NobodyMissingIsSaidInWords) {
  Departure departure;
  departure.survivors = {{rank(0), Place{1, 3, 0, Phase::kDecide}}};
  EXPECT_EQ(departure.describe(),
            "every rank stands still at the same place. 1 left behind, rank 0 (host node0, pid 100) at "
            "attempt 3 of "
            "epoch 1, phase decide");
}

TEST(Departure, ALonelyRankSaysThatItReachesNobody) {
  Departure departure;
  departure.alone = true;
  EXPECT_EQ(departure.describe(), "no progress, and neither rank 0 nor its deputy can be reached");
}

TEST(Departure, ATransportThatFailedIsSaidBesideTheMissing) {
  Departure departure;
  departure.transport_failure = "rank 1: the cable is out";
  departure.missing = {{rank(2), Absence::kDied, std::nullopt}};
  EXPECT_EQ(departure.describe(), "rank 2 (host node2, pid 102) died. Transport of rank 1: the cable is out");
  departure.missing.clear();
  departure.alone = true;
  EXPECT_EQ(
      departure.describe(),
      "the transport failed, and neither rank 0 nor its deputy can be reached. Transport of rank 1: the "
      "cable is out");
}

TEST(Absence, HasAName) {
  EXPECT_EQ(absence_name(Absence::kDied), "died");
  EXPECT_EQ(absence_name(Absence::kSilent), "silent");
  EXPECT_EQ(absence_name(Absence::kStuck), "stuck");
  EXPECT_EQ(absence_name(Absence::kLeft), "left");
}

}  // namespace
}  // namespace holdfast
