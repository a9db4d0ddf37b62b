// What the kernel puts into a record is what Record's own functions do.
#include "cuda/record_lanes.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace holdfast {
namespace {

// A rank's record after two stages, of one probe for each tensor; by the kernel's functions.
Record filled(Record record, const std::vector<CudaProbe>& probes, Stage stage, int rank) {
  cuda::LaneCounts counts;
  for (const CudaProbe& probe : probes) counts.add(probe);
  cuda::add_to_lanes(counts, stage, rank, record.lanes().data());
  return record;
}

Record expected(Record record, const std::vector<CudaProbe>& probes, Stage stage, int rank) {
  BadCounts counts;
  for (const CudaProbe& probe : probes) counts += to_probe(probe).bad;
  record.add_bad(stage, counts);
  if (counts.total() != 0 && stage < Stage::kReduction) record.mark_bad(rank);
  return record;
}

TEST(RecordLanes, AreThoseOfTheHostForEachStageAndClass) {
  for (int s = 0; s < kStageCount; ++s) {
    const auto stage = static_cast<Stage>(s);
    for (const CudaProbe& probe :
         {CudaProbe{}, CudaProbe{.nan = 1}, CudaProbe{.pos_inf = 1}, CudaProbe{.neg_inf = 1}}) {
      Record host;
      host.set_participant(99);
      EXPECT_EQ(filled(host, {{}, probe}, stage, 5), expected(host, {{}, probe}, stage, 5)) << s;
    }
  }
}

TEST(RecordLanes, AreThoseOfTheHostForRandomCountsUpToSaturation) {
  std::mt19937_64 random(3);
  for (int i = 0; i < 20'000; ++i) {
    std::vector<CudaProbe> probes(random() % 5);
    for (CudaProbe& probe : probes) {
      const auto count = [&] { return random() % 2 == 0 ? 0 : random() >> (16 + random() % 48); };
      probe.nan = count();
      probe.pos_inf = count();
      probe.neg_inf = count();
    }
    Record host;
    for (std::size_t lane = 0; lane < 18; ++lane) {
      if (random() % 3 == 0) host.lanes()[lane] = random() % (Record::kMaxPerRank + 1);
    }
    const auto stage = static_cast<Stage>(random() % kStageCount);
    EXPECT_EQ(filled(host, probes, stage, 7), expected(host, probes, stage, 7));
  }
}

// Stages add up, and an earlier stage's findings are not forgotten.
TEST(RecordLanes, OfTwoStagesStandSideBySide) {
  const std::vector<CudaProbe> bad = {{.nan = 2}, {.neg_inf = 3}};
  Record record = filled(Record(), bad, Stage::kBackward, 4);
  record = filled(record, bad, Stage::kReduction, 4);
  record = filled(record, {{}}, Stage::kOptimizer, 4);
  EXPECT_EQ(record.bad(Stage::kBackward), (BadCounts{2, 0, 3}));
  EXPECT_EQ(record.bad(Stage::kReduction), (BadCounts{2, 0, 3}));
  EXPECT_EQ(record.bad_ranks(), 1u);
  EXPECT_EQ(record.bad_rank_sum(), 4u);
  EXPECT_EQ(filled(Record(), bad, Stage::kReduction, 4).bad_ranks(), 0u);
}

}  // namespace
}  // namespace holdfast
