// One rank of eight under mpirun, with data, tensor and pipeline parallelism.
//
//   mpirun -np 8 model_parallel_rank                                   the cases that hold on any fabric
//   mpirun -np 8 model_parallel_rank train RUN_DIR ATTEMPTS [RANK AT]  a run, or the rest of one, with
//   checkpoints;
//                                                                      RANK dies in attempt AT of epoch 1
//
// A run prints, rank by rank, "state rank=R attempt=A updates=U HEX".
#include <gtest/gtest.h>
#include <mpi.h>

#include <csignal>
#include <cstdio>

#include "coord/temp_dir.h"
#include "holdfast/collectives/mpi_collective.h"
#include "ranks/model_parallel_cases.h"

namespace holdfast::model_parallel {
namespace {

// Real communicators, as a trainer has them: one for each row of the cube.
class MpiFabric final : public Fabric {
 public:
  explicit MpiFabric(Place place) {
    MPI_Comm_dup(MPI_COMM_WORLD, &world_);
    MPI_Comm_split(MPI_COMM_WORLD, place.dp * 2 + place.pp, place.tp, &tp_);
    MPI_Comm_split(MPI_COMM_WORLD, place.pp * 2 + place.tp, place.dp, &dp_);
  }
  ~MpiFabric() override {
    for (MPI_Comm* communicator : {&world_, &tp_, &dp_}) MPI_Comm_free(communicator);
  }
  void all_reduce(char axis, std::span<float> values) override {
    MPI_Allreduce(MPI_IN_PLACE, values.data(), static_cast<int>(values.size()), MPI_FLOAT, MPI_SUM,
                  axis == 't' ? tp_ : dp_);
  }
  void all_gather_dp(std::span<const float> half, std::span<float> whole) override {
    const Values mine(half.begin(), half.end());
    const int count = static_cast<int>(mine.size());
    MPI_Allgather(mine.data(), count, MPI_FLOAT, whole.data(), count, MPI_FLOAT, dp_);
  }
  void send(int to, std::span<const float> values) override {
    MPI_Send(values.data(), static_cast<int>(values.size()), MPI_FLOAT, to, 0, world_);
  }
  void receive(int from, std::span<float> values) override {
    MPI_Recv(values.data(), static_cast<int>(values.size()), MPI_FLOAT, from, 0, world_, MPI_STATUS_IGNORE);
  }

 private:
  MPI_Comm world_ = MPI_COMM_NULL;
  MPI_Comm tp_ = MPI_COMM_NULL;
  MPI_Comm dp_ = MPI_COMM_NULL;
};

int world_rank() {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return rank;
}

void on_this_rank(const std::function<void(Collective&, Fabric&)>& body) {
  std::unique_ptr<Collective> collective;
  ASSERT_TRUE(MpiCollective::create(MPI_COMM_WORLD, &collective).ok());
  ASSERT_EQ(collective->size(), kRanks);
  MpiFabric fabric(Place{collective->rank()});
  body(*collective, fabric);
}

TEST(ModelParallelOverMpi, AnyRankNonFiniteAnywhereSkipsOnAllEight) {
  on_this_rank(
      [](Collective& c, Fabric& f) { any_rank_non_finite_anywhere_skips_on_all_eight(c, f, false); });
}
TEST(ModelParallelOverMpi, WithAShardedOptimizerToo) {
  on_this_rank([](Collective& c, Fabric& f) { any_rank_non_finite_anywhere_skips_on_all_eight(c, f, true); });
}
TEST(ModelParallelOverMpi, AnExceptionOnAnyRankEndsAllEightWith80) {
  on_this_rank(an_exception_on_any_rank_ends_all_eight_with_80);
}
TEST(ModelParallelOverMpi, AnExceptionOnAnyRankIsSkippedWhenThePolicySaysSo) {
  on_this_rank(an_exception_on_any_rank_is_skipped_when_the_policy_says_so);
}
TEST(ModelParallelOverMpi, ABitFlipOnAnyRankIsFoundInItsGroup) {
  on_this_rank(a_bit_flip_on_any_rank_is_found_in_its_group);
}
TEST(ModelParallelOverMpi, ALayoutThatDiffersWithinAGroupIsNamed) {
  on_this_rank(a_layout_that_differs_within_a_group_is_named);
}
TEST(ModelParallelOverMpi, MomentsSpoiltInOneShardMakeAllEightGoBack) {
  const TempDir temp;  // only rank 0's is used
  on_this_rank([&](Collective& c, Fabric& f) {
    moments_spoilt_in_one_shard_make_all_eight_go_back(c, f,
                                                       [&](int rank) { return temp / std::to_string(rank); });
  });
}

class FailuresOnly final : public testing::EmptyTestEventListener {
  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (!result.failed()) return;
    std::fprintf(stderr, "rank %d: %s:%d: %s\n", world_rank(), result.file_name() ? result.file_name() : "?",
                 result.line_number(), result.message());
  }
};

// Every rank gives the worst of all results.
int run_cases(int* argc, char** argv) {
  GTEST_FLAG_SET(color, "no");
  testing::InitGoogleTest(argc, argv);
  if (world_rank() != 0) {
    auto& listeners = testing::UnitTest::GetInstance()->listeners();
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new FailuresOnly);
  }
  int result = RUN_ALL_TESTS();
  MPI_Allreduce(MPI_IN_PLACE, &result, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
  return result;
}

int run_training(const std::string& run_dir, std::uint64_t attempts, int dies, std::uint64_t dies_at) {
  std::unique_ptr<Collective> collective;
  Status status = MpiCollective::create(MPI_COMM_WORLD, &collective);
  if (!status.ok()) return status.exit_code();
  const Place place{collective->rank()};
  MpiFabric fabric(place);
  Trainer trainer(place, fabric, true);
  GuardOptions options;  // with its watchdog
  options.run_dir = run_dir;
  options.resume = true;
  options.expected_ranks = kRanks;
  options.axes = place.axes();
  options.checkpoints.interval_attempts = 5;
  std::unique_ptr<StepGuard> guard;
  status = StepGuard::create(*collective, options, &guard);
  if (status.ok()) status = guard->agree_on_layout(trainer.layout());
  if (status.ok()) status = guard->register_state(trainer.registered());
  if (!status.ok()) {
    std::fprintf(stderr, "%s\n", status.to_string().c_str());
    return status.exit_code();
  }
  while (guard->attempt() < attempts) {
    const std::uint64_t data = guard->attempt();
    if (data % 7 == 3)
      trainer.fault = Fault{data, static_cast<int>(data / 7 % kRanks), Where::kBackward, kNanF};
    if (guard->epoch() == 1 && place.rank == dies && data == dies_at) raise(SIGKILL);
    const Decision decision = trainer.attempt(*guard, data);
    if (!decision.agreed) std::_Exit(decision.exit_code());
    if (decision.ends_run()) return decision.exit_code();
    guard->finish();
  }
  const Decision end = guard->close();
  if (!end.agreed) std::_Exit(end.exit_code());
  std::string line = "state rank=" + std::to_string(place.rank) +
                     " attempt=" + std::to_string(guard->attempt()) +
                     " updates=" + std::to_string(guard->updates()) + " ";
  for (const char byte : trainer.state()) {
    constexpr char kDigits[] = "0123456789abcdef";
    const auto bits = static_cast<unsigned char>(byte);
    line += {kDigits[bits >> 4], kDigits[bits & 15]};
  }
  std::printf("%s\n", line.c_str());
  return end.exit_code();
}

}  // namespace
}  // namespace holdfast::model_parallel

int main(int argc, char** argv) {
  using namespace holdfast::model_parallel;
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &provided);
  const bool trains = argc > 3 && std::string(argv[1]) == "train";
  const int dies = argc > 5 ? std::atoi(argv[4]) : -1;
  const auto at = static_cast<std::uint64_t>(argc > 5 ? std::atoll(argv[5]) : 0);
  const int result = trains ? run_training(argv[2], static_cast<std::uint64_t>(std::atoll(argv[3])), dies, at)
                            : run_cases(&argc, argv);
  MPI_Finalize();
  return result;
}
