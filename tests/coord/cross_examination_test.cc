// Which rank makes an origin's attempt again.
#include "holdfast/coord/cross_examination.h"

#include <gtest/gtest.h>

#include "coord/sample_incident.h"
#include "holdfast/collectives/topology.h"
#include "holdfast/coord/evidence/evidence.pb.h"

namespace holdfast {
namespace {

struct Seat {
  std::string host;
  std::string gpu = {};
};

Topology seated(const std::vector<Seat>& seats) {
  std::vector<RankPlacement> placements;
  for (std::size_t r = 0; r < seats.size(); ++r) {
    RankPlacement p;
    p.rank = static_cast<int>(r);
    p.host = seats[r].host;
    p.local_rank = static_cast<int>(r);
    p.gpu_uuid = seats[r].gpu;
    placements.push_back(p);
  }
  return Topology(std::move(placements));
}

Incident bad(const std::vector<int>& ranks, int world_size) {
  Incident incident = sample_incident(world_size, [&](Record& sum) {
    sum.add_bad(Stage::kLoss, {ranks.size(), 0, 0});
  });
  for (const int r : ranks)
    incident.views.push_back(sample_view(r, {{Stage::kLoss, "loss", 0, {1, 0, 0}, 0}}));
  return incident;
}

CrossExamination described(const Topology& topology, int origin, int examiner) {
  CrossExamination of;
  describe_examination(topology, origin, examiner, &of);
  return of;
}

TEST(Examiner, IsOnAnotherHostFirst) {
  const Topology topology = seated({{"a", "G0"}, {"a", "G1"}, {"b", "G2"}, {"c", "G3"}});
  EXPECT_EQ(choose_examiner(topology, bad({0}, 4), 0), 2);
  EXPECT_EQ(choose_examiner(topology, bad({1}, 4), 1), 2);
  EXPECT_EQ(choose_examiner(topology, bad({2}, 4), 2), 0);
  EXPECT_EQ(described(topology, 0, 2).where(), CrossExamination::OTHER_HOST);
}

TEST(Examiner, IsOnAnotherDeviceOfTheSameHostSecond) {
  const Topology topology = seated({{"a", "G0"}, {"a", "G1"}, {"a", "G1"}});
  EXPECT_EQ(choose_examiner(topology, bad({1}, 3), 1), 0);
  EXPECT_EQ(choose_examiner(topology, bad({2}, 3), 2), 0);
  EXPECT_EQ(choose_examiner(topology, bad({0}, 3), 0), 1);
  EXPECT_EQ(described(topology, 2, 0).where(), CrossExamination::OTHER_DEVICE);
}

TEST(Examiner, IsAnyRankOfTheSameHostLast) {
  const Topology shared = seated({{"a", "G0"}, {"a", "G0"}});
  EXPECT_EQ(choose_examiner(shared, bad({0}, 2), 0), 1);
  EXPECT_EQ(described(shared, 0, 1).where(), CrossExamination::SAME_HOST);
  // Of slots it is not known whether they are different devices.
  EXPECT_EQ(described(seated({{"a"}, {"a"}}), 0, 1).where(), CrossExamination::SAME_HOST);
}

TEST(Examiner, HasACleanAttemptOfItsOwnIfAnyHas) {
  const Topology topology = seated({{"a"}, {"a"}, {"b"}, {"b"}});
  EXPECT_EQ(choose_examiner(topology, bad({0, 2}, 4), 0), 3);
  EXPECT_EQ(choose_examiner(topology, bad({0, 2, 3}, 4), 0), 1);
  EXPECT_EQ(choose_examiner(topology, bad({0, 1, 2, 3}, 4), 0), 2);
}

TEST(Examiner, HasTheSameParameters) {
  const Topology topology = seated({{"a"}, {"b"}, {"b"}, {"a"}});
  Incident incident = bad({0}, 4);
  incident.replica_groups = {"tp=0", "tp=1", "tp=1", "tp=0"};
  EXPECT_EQ(choose_examiner(topology, incident, 0), 3);
  incident.replica_groups = {"tp=0", "tp=1", "tp=2", "tp=3"};
  EXPECT_EQ(choose_examiner(topology, incident, 0), -1);
}

TEST(Examiner, IsNobodyWhenThereIsOneRank) {
  EXPECT_EQ(choose_examiner(seated({{"a"}}), bad({0}, 1), 0), -1);
  EXPECT_EQ(choose_examiner(Topology(), bad({0}, 1), 0), -1);
}

TEST(Examination, NamesBothPlaces) {
  const CrossExamination of = described(seated({{"a", "G0"}, {"b", "G1"}}), 1, 0);
  EXPECT_EQ(of.origin(), 1);
  EXPECT_EQ(of.origin_host(), "b");
  EXPECT_EQ(of.origin_device(), "b/G1");
  EXPECT_EQ(of.examiner(), 0);
  EXPECT_EQ(of.examiner_host(), "a");
  EXPECT_EQ(of.examiner_device(), "a/G0");
  EXPECT_FALSE(described(seated({{"a"}}), 0, -1).has_examiner());
}

EvidencePart rerun(int rank, bool reran, bool agrees, const std::string& failure = "") {
  EvidencePart part;
  part.set_rank(rank);
  part.set_reran(reran);
  part.set_rerun_agrees(agrees);
  if (!failure.empty()) part.set_failure(failure);
  return part;
}

TEST(Examination, SaysWhoDidNotMakeTheAttemptAgain) {
  const EvidencePart found = rerun(1, true, true);
  const EvidencePart idle = rerun(3, false, false);
  const auto why = [](const EvidencePart* origin, const EvidencePart* examiner) {
    CrossExamination of;
    judge_examination(origin, examiner, &of);
    EXPECT_EQ(of.outcome(), CrossExamination::NOT_EXAMINED);
    return of.why();
  };
  EXPECT_EQ(why(nullptr, &found), "the origin sent nothing");
  EXPECT_EQ(why(&found, nullptr), "the examiner sent nothing");
  EXPECT_EQ(why(&idle, &found), "rank 3 did not make the attempt again");
  EXPECT_EQ(why(&found, &idle), "rank 3 did not make the attempt again");
}

}  // namespace
}  // namespace holdfast
