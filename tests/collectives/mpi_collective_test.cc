#include "holdfast/collectives/mpi_collective.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <map>
#include <string>

#include "collectives/conformance.h"
#include "collectives/failure_cases.h"

namespace {
std::string g_failing;  // the MPI function that fails; "" for none
int g_failed_calls = 0;

bool fails(const char* function) {
  if (g_failing != function) return false;
  ++g_failed_calls;
  return true;
}
}  // namespace

// MPI's profiling interface lets a program stand in front of the library: here it is a network that fails.
extern "C" {
int MPI_Allreduce(const void* send, void* receive, int count, MPI_Datatype type, MPI_Op op, MPI_Comm comm) {
  return fails("MPI_Allreduce") ? MPI_ERR_OTHER : PMPI_Allreduce(send, receive, count, type, op, comm);
}
int MPI_Gather(const void* send, int sends, MPI_Datatype send_type, void* receive, int receives,
               MPI_Datatype receive_type, int root, MPI_Comm comm) {
  if (fails("MPI_Gather")) return MPI_ERR_OTHER;
  return PMPI_Gather(send, sends, send_type, receive, receives, receive_type, root, comm);
}
int MPI_Bcast(void* data, int count, MPI_Datatype type, int root, MPI_Comm comm) {
  return fails("MPI_Bcast") ? MPI_ERR_OTHER : PMPI_Bcast(data, count, type, root, comm);
}
}

namespace holdfast {
namespace {

std::unique_ptr<Collective> over(MPI_Comm communicator) {
  std::unique_ptr<Collective> collective;
  const Status status = MpiCollective::create(communicator, &collective);
  EXPECT_TRUE(status.ok()) << status.to_string();
  return collective;
}

class MpiConformance : public testing::TestWithParam<conformance::Case> {};

TEST_P(MpiConformance, Holds) { GetParam().on_each_rank(*over(MPI_COMM_WORLD)); }

INSTANTIATE_TEST_SUITE_P(Backends, MpiConformance, testing::ValuesIn(conformance::cases()),
                         [](const auto& param) { return std::string(param.param.name); });

TEST(MpiCollective, HasTheRanksOfTheCommunicatorItWasGiven) {
  int world_rank = 0;
  int world_size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
  MPI_Comm_size(MPI_COMM_WORLD, &world_size);
  EXPECT_EQ(over(MPI_COMM_WORLD)->rank(), world_rank);
  EXPECT_EQ(over(MPI_COMM_WORLD)->size(), world_size);

  MPI_Comm reversed = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, 0, -world_rank, &reversed);
  {
    const auto collective = over(reversed);
    EXPECT_EQ(collective->rank(), world_size - 1 - world_rank);
    conformance::gather_keeps_messages_of_different_lengths_apart(*collective);
  }
  MPI_Comm_free(&reversed);  // still the caller's
}

TEST(MpiCollective, NothingOfOursEverLandsInTheCallersReceives) {
  int rank = 0;
  int size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  const auto collective = over(MPI_COMM_WORLD);

  // The caller waits for anything from anybody while the guard is busy.
  std::vector<char> box(std::size_t{1} << 20);
  MPI_Request request = MPI_REQUEST_NULL;
  MPI_Irecv(box.data(), static_cast<int>(box.size()), MPI_BYTE, MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD,
            &request);
  conformance::gather_keeps_every_byte(*collective);
  conformance::mixed_sequences_never_mix_their_messages(*collective);
  int arrived = 0;
  MPI_Test(&request, &arrived, MPI_STATUS_IGNORE);
  EXPECT_FALSE(arrived);
  conformance::expect_reduce(*collective, 1);  // all have looked

  // And gets its own message, and only that.
  const char mine = static_cast<char>('a' + rank);
  MPI_Send(&mine, 1, MPI_BYTE, (rank + 1) % size, 1, MPI_COMM_WORLD);
  MPI_Status status;
  MPI_Wait(&request, &status);
  int count = 0;
  MPI_Get_count(&status, MPI_BYTE, &count);
  EXPECT_EQ(count, 1);
  EXPECT_EQ(status.MPI_SOURCE, (rank + size - 1) % size);
  EXPECT_EQ(box[0], 'a' + (rank + size - 1) % size);
}

TEST(MpiCollective, NothingOfTheCallersEverLandsInOurGather) {
  int rank = 0;
  int size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  const auto collective = over(MPI_COMM_WORLD);
  constexpr int kTags = 4;  // ours is among them

  // Messages of the caller that rank 0 has not received yet, sent before ours.
  for (int tag = 0; rank != 0 && tag < kTags; ++tag) MPI_Send("caller", 6, MPI_BYTE, 0, tag, MPI_COMM_WORLD);
  conformance::expect_gather(*collective, [](int r) { return "guard " + std::to_string(r); });
  for (int r = 1; rank == 0 && r < size; ++r) {
    for (int tag = 0; tag < kTags; ++tag) {
      char text[6] = {};
      MPI_Recv(text, 6, MPI_BYTE, r, tag, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
      EXPECT_EQ(std::string(text, 6), "caller");
    }
  }
}

TEST(MpiCollective, TwoOverOneCommunicatorDoNotMix) {
  const auto first = over(MPI_COMM_WORLD);
  const auto second = over(MPI_COMM_WORLD);
  for (int round = 0; round < 50; ++round) {
    conformance::expect_reduce(*first, round);
    conformance::expect_gather(*second, [&](int r) { return "second " + std::to_string(r + round); });
    conformance::expect_gather(*first, [&](int r) { return "first " + std::to_string(r - round); });
  }
}

TEST(MpiCollective, AFailureNamesTheOperationAndMpiIsNotCalledAgain) {
  const std::map<std::string, std::string> first_calls = {{"reduce", "MPI_Allreduce"},
                                                          {"gather", "MPI_Gather"},
                                                          {"broadcast", "MPI_Bcast"},
                                                          {"agree_on_status", "MPI_Allreduce"}};
  for (const conformance::Operation& operation : conformance::operations()) {
    const auto collective = over(MPI_COMM_WORLD);
    const std::string function = first_calls.at(operation.name);
    g_failing = function;
    g_failed_calls = 0;
    conformance::expect_failure(*collective, operation);
    EXPECT_EQ(g_failed_calls, 1) << function;
    Record record;
    const Status status = collective->reduce(record);
    EXPECT_EQ(status.message().find(function + " failed: "), 0u) << status.message();
    g_failing.clear();
  }
}

// Rank 0 speaks for the job; another rank only says what failed.
class FailuresOnly final : public testing::EmptyTestEventListener {
 public:
  explicit FailuresOnly(int rank) : rank_(rank) {}
  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (!result.failed()) return;
    std::fprintf(stderr, "rank %d: %s:%d: %s\n", rank_, result.file_name() ? result.file_name() : "?",
                 result.line_number(), result.message());
  }

 private:
  const int rank_;
};

// Every rank gives the worst of all results, so that a failure on any rank fails the job.
int run_on_every_rank(int* argc, char** argv) {
  GTEST_FLAG_SET(color, "no");  // mpirun's output is no terminal
  testing::InitGoogleTest(argc, argv);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  if (rank != 0) {
    auto& listeners = testing::UnitTest::GetInstance()->listeners();
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new FailuresOnly(rank));
  }
  int result = RUN_ALL_TESTS();
  if (testing::UnitTest::GetInstance()->test_to_run_count() == 0) result = 1;
  MPI_Allreduce(MPI_IN_PLACE, &result, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
  return result;
}

}  // namespace
}  // namespace holdfast

int main(int argc, char** argv) {
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &provided);
  const int result = holdfast::run_on_every_rank(&argc, argv);
  MPI_Finalize();
  return result;
}
