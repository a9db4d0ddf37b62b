// What the guard's watchdogs make of a NCCL that fails or hangs. They end the process, of which all ranks are
// threads here: whoever is first takes the others with it, so each rank waits, as long as it may, until all
// have let go.
#include <cstdio>
#include <cstdlib>
#include <optional>

#include <nccl.h>

#include "collectives/nccl_ranks.h"
#include "coord/events.h"
#include "coord/temp_dir.h"
#include "ranks/guarded_ranks.h"

namespace holdfast {
namespace {

using stand_in::Kind;
using std::chrono::milliseconds;
using testing::ExitedWithCode;
using Clock = std::chrono::steady_clock;

constexpr int kRanks = 3;
constexpr char kFolder[] = "HOLDFAST_NCCL_LEAVING_TEST";  // of the parent, told to the process that ends

// Every rank has called ncclCommAbort so often.
bool all_aborted(int times) {
  for (int r = 0; r < kRanks; ++r) {
    if (stand_in::calls(r, "ncclCommAbort") < times) return false;
  }
  return true;
}
void wait_for_all_to_abort(int times) {
  if (within(milliseconds(1'500), [&] { return all_aborted(times); })) std::fputs("all aborted\n", stderr);
}

// Longer than any watchdog here takes to end the process.
[[noreturn]] void be_busy_elsewhere() {
  std::this_thread::sleep_for(std::chrono::seconds(30));
  std::_Exit(3);
}

class NcclLeaving : public testing::Test {
 protected:
  void SetUp() override {
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    const char* told = std::getenv(kFolder);
    if (told != nullptr) {
      folder_ = told;
      return;
    }
    own_.emplace();
    folder_ = own_->path();
    setenv(kFolder, folder_.c_str(), 1);
  }
  void TearDown() override {
    if (own_) unsetenv(kFolder);
  }

  GuardOptions options(const std::string& policy) const {
    GuardOptions options = guard_options(policy, folder_);
    options.watchdog = true;
    return options;
  }

  // The one departure on record.
  Json departure() const {
    const std::vector<Json> lines = parse_events(read_file(folder_ + "/departures.jsonl"));
    EXPECT_EQ(lines.size(), 1u);
    return lines.empty() ? Json() : lines.front();
  }

 private:
  std::optional<TempDir> own_;
  std::string folder_;
};

constexpr char kNeverOverdue[] = "attempt_deadline_seconds: 3600";
constexpr char kAsynchronous[] = "asynchronous error of NCCL: remote process exited: the last words";

TEST_F(NcclLeaving, AnAsynchronousErrorUnderABusyTrainerAbortsAtOnceGoesOnRecordAndAllLeave) {
  const auto start = Clock::now();
  EXPECT_EXIT(
      run_nccl(kRanks,
               [&](NcclCollective& collective) {
                 const int rank = collective.rank();
                 GuardOptions leaving = options(kNeverOverdue);
                 leaving.before_leaving = [] { wait_for_all_to_abort(1); };
                 const auto guard = create_guard(collective, leaving);
                 EXPECT_TRUE(attempt(*guard, [] {}).apply());
                 guard->begin();
                 if (rank != 1) be_busy_elsewhere();
                 inject_next("ncclCommGetAsyncError", 1, Kind::kAsyncError);
                 const bool seen =
                     within(milliseconds(2'000), [] { return stand_in::calls(1, "ncclCommAbort") == 1; });
                 if (seen && stand_in::calls(0, "ncclCommAbort") + stand_in::calls(2, "ncclCommAbort") == 0) {
                   std::fputs("aborted on rank 1 alone\n", stderr);
                 }
                 be_busy_elsewhere();
               }),
      ExitedWithCode(84),
      "^holdfast: rank 1: the transport failed: " + std::string(kAsynchronous) +
          "\naborted on rank 1 alone\n(.*\n)*all aborted\n");
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(25));
  const Json record = departure();
  EXPECT_EQ(record["reported_by"], 0);
  EXPECT_EQ(record["missing"], Json::array());
  EXPECT_EQ(record["survivors"].size(), 3u);
  EXPECT_EQ(record["transport_failure"], "rank 1: " + std::string(kAsynchronous));
}

// The run ends as after any failed collective: by a decision, which the watchdog leaves the trainer to act
// on.
TEST_F(NcclLeaving, ATrainerThatComesByAnAsynchronousErrorEndsInOrder) {
  EXPECT_EXIT(
      {
        run_nccl(1, [&](NcclCollective& collective) {
          const auto guard = create_guard(collective, options(kNeverOverdue));
          const Decision decision = attempt(*guard, [] {
            inject_next("ncclCommGetAsyncError", 0, Kind::kAsyncError);
            within(milliseconds(2'000), [] { return stand_in::calls(0, "ncclCommAbort") == 1; });
          });
          EXPECT_EQ(decision.exit_code(), 84);
          EXPECT_FALSE(decision.agreed);
          std::fprintf(stderr, "%s\n", decision.reason.c_str());
          std::this_thread::sleep_for(std::chrono::seconds(6));
        });
        expect_clean_end();
        std::exit(testing::Test::HasFailure() ? 1 : 0);
      },
      ExitedWithCode(0), "ncclAllReduce: the communicator was aborted, for " + std::string(kAsynchronous));
}

// The trainer's own all-reduce. Ended by an abort, it returns.
void reduce_gradient(ncclComm* theirs, int rank) {
  const cudaStream_t stream = stand_in::make_stream(rank);
  std::uint64_t* lanes = stand_in::make_lanes(rank);
  EXPECT_EQ(ncclAllReduce(lanes, lanes, 32, ncclUint64, ncclSum, theirs, stream), ncclSuccess);
  while (cudaStreamQuery(stream) == cudaErrorNotReady) std::this_thread::sleep_for(milliseconds(1));
}

// Rank 2 hangs in the middle of the trainer's all-reduce, which the others have got over: they wait for it in
// the guard's.
void hang_on_rank_2(const GuardOptions& options, const std::function<void(ncclComm*)>& before_leaving) {
  run_nccl(kRanks, [&](NcclCollective& collective) {
    const int rank = collective.rank();
    ncclComm* theirs = stand_in::make_communicator("the trainer's", rank, kRanks);
    GuardOptions leaving = options;
    leaving.before_leaving = [&] { before_leaving(theirs); };
    const auto guard = create_guard(collective, leaving);
    Record together;
    EXPECT_TRUE(collective.reduce(together).ok());
    EXPECT_TRUE(attempt(*guard, [&] { reduce_gradient(theirs, rank); }).apply());
    guard->begin();
    if (rank == 2) inject_next("ncclAllReduce", 2, Kind::kNeverCompletes);
    reduce_gradient(theirs, rank);
    guard->decide();
    be_busy_elsewhere();
  });
}

void expect_that_rank_2_is_stuck(const Json& record) {
  EXPECT_EQ(record["reported_by"], 0);
  ASSERT_EQ(record["missing"].size(), 1u);
  EXPECT_EQ(record["missing"][0]["rank"], 2);
  EXPECT_EQ(record["missing"][0]["absence"], "stuck");
  EXPECT_EQ(record["missing"][0]["attempt"], 1);
  EXPECT_EQ(record["missing"][0]["phase"], "begin");
  ASSERT_EQ(record["survivors"].size(), 2u);
  for (const Json& rank : record["survivors"]) EXPECT_EQ(rank["phase"], "decide");
  EXPECT_FALSE(record.contains("transport_failure"));
}

TEST_F(NcclLeaving, ARankThatHangsInACollectiveIsNamedAndEveryCommunicatorIsAbortedBeforeAllLeave) {
  const auto start = Clock::now();
  EXPECT_EXIT(hang_on_rank_2(options("attempt_deadline_seconds: 2"),
                             [](ncclComm* theirs) {
                               ncclCommAbort(theirs);
                               wait_for_all_to_abort(2);
                             }),
              ExitedWithCode(84), "rank 2 .* is stuck at attempt 1 (.*\n)*all aborted\n");
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(25));
  expect_that_rank_2_is_stuck(departure());
}

TEST_F(NcclLeaving, AnAbortThatNeverReturnsHoldsUpNobody) {
  const auto start = Clock::now();
  EXPECT_EXIT(
      {
        for (int r = 0; r < kRanks; ++r) stand_in::inject({"ncclCommAbort", r, 1, Kind::kNeverReturns});
        hang_on_rank_2(options("attempt_deadline_seconds: 2"), [](ncclComm*) {
          if (within(milliseconds(1'500), [] { return stand_in::held_back() == kRanks; }))
            std::fputs("all are in ncclCommAbort\n", stderr);
        });
      },
      ExitedWithCode(84), "(.*\n)*all are in ncclCommAbort\n");
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(25));
  expect_that_rank_2_is_stuck(departure());
}

}  // namespace
}  // namespace holdfast
