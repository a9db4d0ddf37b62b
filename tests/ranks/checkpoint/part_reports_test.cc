#include "part_reports.h"

#include <gtest/gtest.h>

namespace holdfast {
namespace {

constexpr GenerationId kId{1, 600};

PartReport report(int rank) {
  PartReport report;
  report.set_rank(rank);
  report.set_epoch(kId.epoch);
  report.set_attempt(kId.attempt);
  if (rank == 0) report.add_parts()->set_file("replicated.safetensors");
  Part* own = report.add_parts();
  own->set_file("rank-0000" + std::to_string(rank) + ".safetensors");
  own->set_rank(rank);
  return report;
}

std::string refusal(const PartReport& of_rank_1, bool* non_finite = nullptr) {
  const RanksState ranks = {.writes = {true, true, false}, .arrays = {}};
  Manifest manifest;
  const Refusal refusal =
      assemble({report(0).SerializeAsString(), of_rank_1.SerializeAsString(), ""}, ranks, kId, &manifest);
  if (non_finite != nullptr) *non_finite = refusal.non_finite;
  if (refusal.reason.empty()) {
    EXPECT_EQ(manifest.parts_size(), 3);
    EXPECT_EQ(manifest.parts(2).file(), "rank-00001.safetensors");
  }
  return refusal.reason;
}

TEST(PartReports, AreOfTheRankAndTheGenerationThatIsPublished) {
  PartReport of_rank_1 = report(1);
  EXPECT_EQ(refusal(of_rank_1), "");
  of_rank_1.set_epoch(2);
  EXPECT_EQ(refusal(of_rank_1), "rank 1: it is at e0002-a0000000600 where rank 0 is at e0001-a0000000600");
  of_rank_1 = report(1);
  of_rank_1.set_attempt(601);
  EXPECT_EQ(refusal(of_rank_1), "rank 1: it is at e0001-a0000000601 where rank 0 is at e0001-a0000000600");
  EXPECT_EQ(refusal(report(2)), "rank 1: its report is of rank 2");
}

TEST(PartReports, NameNoFileButTheRanksOwn) {
  for (const char* name : {"replicated.safetensors", "rank-00002.safetensors", "../x", ""}) {
    PartReport of_rank_1 = report(1);
    of_rank_1.mutable_parts(0)->set_file(name);
    EXPECT_EQ(refusal(of_rank_1), std::string("rank 1: its report names ") + name);
  }
  PartReport of_rank_1 = report(1);
  of_rank_1.mutable_parts(0)->set_rank(2);
  EXPECT_EQ(refusal(of_rank_1), "rank 1: its report names rank-00001.safetensors");
}

TEST(PartReports, ARankThatHasSomethingToWriteAndDidNotIsAFailure) {
  EXPECT_EQ(refusal(PartReport()), "rank 1: it has written nothing");
  PartReport of_rank_1 = report(1);
  of_rank_1.clear_parts();
  EXPECT_EQ(refusal(of_rank_1), "rank 1: it has written nothing");
}

TEST(PartReports, AMalformedOneIsAFailure) {
  const RanksState ranks = {.writes = {true}, .arrays = {}};
  Manifest manifest;
  EXPECT_EQ(assemble({"\xff\xff"}, ranks, kId, &manifest).reason, "rank 0: its report is malformed");
}

TEST(PartReports, ANonFiniteValueIsNamedBeforeAnythingElse) {
  const RanksState ranks = {.writes = {true, true, true}, .arrays = {}};
  std::vector<Bytes> reports;
  for (int rank = 0; rank < 3; ++rank) {
    PartReport failed;
    failed.set_failure(rank == 0 ? "No space left on device" : "conv1.weight[17] is NaN");
    failed.set_non_finite(rank > 0);
    reports.push_back(failed.SerializeAsString());
  }
  Manifest manifest;
  const Refusal refusal = assemble(reports, ranks, kId, &manifest);
  EXPECT_TRUE(refusal.non_finite);
  EXPECT_EQ(refusal.reason, "conv1.weight[17] is NaN on rank 1");
}

}  // namespace
}  // namespace holdfast
