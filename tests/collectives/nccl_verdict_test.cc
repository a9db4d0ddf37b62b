// The flag that a kernel leaves for the optimizer is what the host would have said.
#include "nccl_verdict.h"

#include <random>

#include "collectives/nccl_ranks.h"
#include "holdfast/collectives/verdict.h"

namespace holdfast {
namespace {

bool refuses(const Record& sum, int world_size) {
  bool any = false;
  for (std::size_t lane = 0; lane < Record::kLanes; ++lane) {
    any |= cuda::lane_refuses(lane, sum.lanes().data(), static_cast<std::uint64_t>(world_size));
  }
  return any;
}

Record clean_sum(int world_size) {
  Record sum;
  sum.lanes()[Record::kParticipantsLane] = static_cast<std::uint64_t>(world_size);
  return sum;
}

TEST(NcclVerdict, IsTheHostsForEachSingleLaneThatIsNotZero) {
  for (const int size : {1, 2, 3, 64}) {
    EXPECT_FALSE(refuses(clean_sum(size), size));
    EXPECT_TRUE(refuses(Record(), size));
    EXPECT_TRUE(refuses(clean_sum(size), size + 1));
    for (std::size_t lane = 0; lane < Record::kLanes; ++lane) {
      for (int bit = 0; bit < 64; ++bit) {
        Record sum = clean_sum(size);
        sum.lanes()[lane] ^= std::uint64_t{1} << bit;
        EXPECT_EQ(refuses(sum, size), !judge(sum, size).clean()) << "lane " << lane << ", bit " << bit;
      }
    }
  }
}

TEST(NcclVerdict, IsTheHostsForRandomSums) {
  std::mt19937_64 random(11);
  int clean = 0;
  for (int i = 0; i < 200'000; ++i) {
    const int size = 1 + static_cast<int>(random() % 4);
    Record sum = clean_sum(size);
    for (std::uint64_t changes = random() % 4; changes > 0; --changes) {
      sum.lanes()[random() % Record::kLanes] = random() % 2 == 0 ? random() % 6 : random();
    }
    EXPECT_EQ(refuses(sum, size), !judge(sum, size).clean());
    clean += judge(sum, size).clean() ? 1 : 0;
  }
  EXPECT_GT(clean, 10'000);
  EXPECT_LT(clean, 190'000);
}

using NcclVerdictOnDevice = NcclTest;

TEST_F(NcclVerdictOnDevice, SkipsUntilThereIsASumAndThenFollowsEach) {
  run_nccl(2, [](NcclCollective& collective) {
    EXPECT_EQ(*collective.device_skip_flag(), 1u);
    const cudaStream_t stream = stand_in::make_stream(collective.rank());
    std::uint64_t* lanes = stand_in::make_lanes(collective.rank());
    std::mt19937_64 random(5);  // the same draws on every rank
    for (int attempt = 0; attempt < 300; ++attempt) {
      const int bad_rank = static_cast<int>(random() % 3);  // 2: none
      Record mine;
      mine.set_participant(agreement_coefficient(collective.rank(), 2) * 77);
      if (bad_rank == collective.rank()) mine.add_bad(Stage::kBackward, {1, 0, 0});
      std::copy(mine.lanes().begin(), mine.lanes().end(), lanes);
      Record sum;
      ASSERT_TRUE(collective.reduce_on(stream, lanes).ok());
      ASSERT_TRUE(collective.wait(&sum).ok());
      EXPECT_EQ(*collective.device_skip_flag(), bad_rank == 2 ? 0u : 1u);
      EXPECT_EQ(judge(sum, 2).clean(), bad_rank == 2);
      Record barrier;  // nobody is ahead, and writes the flag
      ASSERT_TRUE(collective.reduce(barrier).ok());
    }
  });
  expect_clean_end();
}

}  // namespace
}  // namespace holdfast
