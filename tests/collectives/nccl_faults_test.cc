// Each call that the backend makes in its creation, its end, with long messages and on the caller's stream
// fails once: the rank on which it fails knows, nobody is told a wrong sum, nobody waits for ever, nothing is
// called on what has ended, and everything is given back. For the operations see nccl_failure_test.cc.
#include <algorithm>
#include <set>
#include <tuple>

#include "collectives/conformance.h"
#include "collectives/nccl_ranks.h"
#include "nccl_link.h"

namespace holdfast {
namespace {

using stand_in::Kind;
using std::chrono::milliseconds;

constexpr int kRanks = 2;
// Whoever is not told waits so long: in the many runs with a fault as little as can be, since a rank that
// fails for being slow is no worse than one that fails. Where all must be well, or the text is looked at,
// longer.
constexpr milliseconds kImpatient{30};
constexpr milliseconds kDeadline{150};
constexpr milliseconds kOneSecond{1'000};
constexpr milliseconds kPatient{15'000};

const std::set<std::string> kEndings = {"cudaFree",      "cudaFreeHost",    "cudaStreamDestroy",
                                        "ncclCommAbort", "ncclCommDestroy", "ncclCommFinalize"};
// How often they are called depends on how long things take.
const std::set<std::string> kPolls = {"cudaStreamQuery", "ncclCommGetAsyncError"};

Bytes message(int rank) { return conformance::random_bytes(NcclLink::kChunk + 5, std::uint64_t(rank) + 1); }

// Messages in several pieces, and sums on the caller's stream. What is ok is also right.
std::vector<Status> work(NcclCollective& collective) {
  std::vector<Status> statuses;
  const auto check = [&](const Status& status, bool right) {
    EXPECT_TRUE(right || !status.ok()) << "operation " << statuses.size();
    statuses.push_back(status);
  };
  std::vector<Bytes> all;
  Status status = collective.gather(message(collective.rank()), &all);
  check(status, collective.rank() != 0 || (all.size() == 2 && all[0] == message(0) && all[1] == message(1)));
  if (!status.ok()) {
    EXPECT_TRUE(all.empty());
  }

  const cudaStream_t stream = stand_in::make_stream(collective.rank());
  std::uint64_t* lanes = stand_in::make_lanes(collective.rank());
  for (int round = 0; round < 2; ++round) {
    const Record mine = conformance::contribution(collective.rank(), round);
    std::copy(mine.lanes().begin(), mine.lanes().end(), lanes);
    statuses.push_back(collective.reduce_on(stream, lanes));
    Record sum;
    status = statuses.back().ok() ? collective.wait(&sum) : statuses.back();
    check(status, sum == conformance::expected_sum(kRanks, round));
  }
  return statuses;
}

enum class Made { kFromId, kFromCommunicator };

// By rank: the creation, and each operation.
std::vector<std::vector<Status>> run_all(Made made, milliseconds deadline) {
  Bytes id;
  if (made == Made::kFromId) static_cast<void>(NcclCollective::make_id(&id));
  std::vector<std::vector<Status>> statuses(kRanks);
  on_threads(kRanks, [&](int rank) {
    std::vector<Status>& mine = statuses[static_cast<std::size_t>(rank)];
    std::unique_ptr<NcclCollective> collective;
    cudaSetDevice(rank);
    mine.push_back(made == Made::kFromId
                       ? NcclCollective::create(id, rank, kRanks, rank, nccl_options(deadline), &collective)
                       : NcclCollective::create(stand_in::make_communicator("theirs", rank, kRanks),
                                                nccl_options(deadline), &collective));
    EXPECT_EQ(collective != nullptr, mine.back().ok());
    if (!collective) return;
    for (Status& status : work(*collective)) mine.push_back(std::move(status));
  });
  return statuses;
}

// From the first failure on, all are that one.
void expect_sticky(const std::vector<Status>& statuses) {
  const auto first = std::ranges::find_if(statuses, [](const Status& s) { return !s.ok(); });
  for (auto s = first; s != statuses.end(); ++s) {
    EXPECT_EQ(s->to_string(), first->to_string());
    if (first != statuses.begin()) {
      EXPECT_EQ(s->code(), StatusCode::kRankMissing);
    }
  }
}

class NcclFaults : public testing::TestWithParam<std::tuple<Made, int>> {};

void fail_call(Made made, int rank, const std::string& function, int call, int count) {
  SCOPED_TRACE(function + ", call " + std::to_string(call) + " of rank " + std::to_string(rank));
  // What fails at the end, or in the thread that ends, leaves all that went before as it was.
  const bool ending = kEndings.contains(function) || (function == "cudaSetDevice" && call == count);
  stand_in::reset();
  stand_in::inject({function, rank, call, Kind::kError});
  const auto start = std::chrono::steady_clock::now();
  const auto statuses = run_all(made, ending ? kPatient : kImpatient);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
  const Status& last = statuses[static_cast<std::size_t>(rank)].back();
  if (ending) {
    EXPECT_TRUE(last.ok()) << last.to_string();
  } else if (stand_in::calls(rank, function) >= call) {
    EXPECT_FALSE(last.ok());
  }
  for (const auto& each : statuses) expect_sticky(each);
  expect_clean_end();
}

TEST_P(NcclFaults, EachCallFailingOnceIsKnownWhereItFailedAndNowhereHangsOrLies) {
  const auto [made, rank] = GetParam();
  stand_in::reset();
  for (const auto& statuses : run_all(made, kPatient)) {
    for (const Status& status : statuses) ASSERT_TRUE(status.ok()) << status.to_string();
  }
  std::map<std::string, int> calls = stand_in::calls(rank);
  calls.erase("ncclGetUniqueId");  // whose call it is depends on the test before
  EXPECT_EQ(calls.size(), made == Made::kFromId ? 18u : 21u);
  for (const auto& [function, count] : calls) {
    const int first = function == "cudaSetDevice" ? 2 : 1;  // one is the test's own
    const int last = kPolls.contains(function) ? std::min(count, 4) : count;
    for (int call = first; call <= last; ++call) fail_call(made, rank, function, call, count);
  }
}

TEST_P(NcclFaults, AnAsynchronousErrorEndsWhateverIsGoingOn) {
  const auto [made, rank] = GetParam();
  for (const int call : {1, 3, 8}) {
    SCOPED_TRACE(call);
    stand_in::reset();
    stand_in::answer_late(call == 8 ? 0 : 1);  // 0: seen by who waits for the stream, not for a call
    stand_in::inject({"ncclCommGetAsyncError", rank, call, Kind::kAsyncError});
    const auto statuses = run_all(made, kOneSecond);
    ASSERT_GE(stand_in::calls(rank, "ncclCommGetAsyncError"), call);
    const Status& last = statuses[static_cast<std::size_t>(rank)].back();
    EXPECT_EQ(last.code(), StatusCode::kRankMissing);
    EXPECT_NE(last.message().find("remote process exited: the last words"), std::string::npos)
        << last.message();
    for (const auto& each : statuses) expect_sticky(each);
    expect_clean_end();
  }
}

TEST_P(NcclFaults, ACollectiveThatNeverCompletesEndsByTheDeadline) {
  const auto [made, rank] = GetParam();
  stand_in::reset();
  static_cast<void>(run_all(made, kPatient));
  const std::map<std::string, int> calls = stand_in::calls(rank);
  for (const std::string function : {"ncclAllReduce", rank == 0 ? "ncclRecv" : "ncclSend"}) {
    ASSERT_TRUE(calls.contains(function)) << function;
    for (const int call : std::set<int>{1, calls.at(function) / 2 + 1, calls.at(function)}) {
      SCOPED_TRACE(function + ", call " + std::to_string(call));
      stand_in::reset();
      stand_in::inject({function, rank, call, Kind::kNeverCompletes});
      const auto statuses = run_all(made, kDeadline);
      EXPECT_EQ(statuses[static_cast<std::size_t>(rank)].back().code(), StatusCode::kRankMissing);
      EXPECT_NE(statuses[static_cast<std::size_t>(rank)].back().message().find("did not end within 150 ms"),
                std::string::npos)
          << statuses[static_cast<std::size_t>(rank)].back().message();
      for (const auto& each : statuses) expect_sticky(each);
      expect_clean_end();
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Creations, NcclFaults,
                         testing::Combine(testing::Values(Made::kFromId, Made::kFromCommunicator),
                                          testing::Range(0, kRanks)),
                         [](const auto& param) {
                           return std::string(std::get<0>(param.param) == Made::kFromId ? "id" : "split") +
                                  "_on_rank_" + std::to_string(std::get<1>(param.param));
                         });

TEST(NcclMissing, ARankThatNeverComesIsMissedAtTheCreation) {
  for (int absent = 0; absent < 3; ++absent) {
    SCOPED_TRACE(absent);
    stand_in::reset();
    Bytes id;
    ASSERT_TRUE(NcclCollective::make_id(&id).ok());
    on_threads(3, [&](int rank) {
      if (rank == absent) return;
      std::unique_ptr<NcclCollective> collective;
      EXPECT_EQ(NcclCollective::create(id, rank, 3, rank, nccl_options(kDeadline), &collective).code(),
                StatusCode::kRankMissing);
    });
    expect_clean_end();
  }
}

// After a failure nothing more is enqueued, and the communicator is aborted, never destroyed.
TEST(NcclMissing, AfterAFailureNothingIsEnqueuedAndTheCommunicatorIsAbortedOnce) {
  stand_in::reset();
  run_nccl(1, [](NcclCollective& collective) {
    stand_in::inject({"ncclAllReduce", 0, stand_in::calls(0, "ncclAllReduce") + 1, Kind::kError});
    Record record;
    const Status failure = collective.reduce(record);
    EXPECT_EQ(failure.to_string(), "RANK_MISSING (84): ncclAllReduce: injected system error: the last words");
    const auto before = stand_in::calls(0);
    std::vector<Bytes> all;
    Bytes bytes = "b";
    EXPECT_EQ(collective.reduce(record).to_string(), failure.to_string());
    EXPECT_EQ(collective.gather("mine", &all).to_string(), failure.to_string());
    EXPECT_EQ(collective.broadcast(&bytes).to_string(), failure.to_string());
    EXPECT_EQ(collective.reduce_on(stand_in::make_stream(0), stand_in::make_lanes(0)).to_string(),
              failure.to_string());
    EXPECT_EQ(collective.wait(&record).to_string(), failure.to_string());
    EXPECT_EQ(stand_in::calls(0), before);
  });
  EXPECT_EQ(stand_in::calls(0, "ncclCommAbort"), 1);
  EXPECT_EQ(stand_in::calls(0, "ncclCommFinalize"), 0);
  EXPECT_EQ(stand_in::calls(0, "ncclCommDestroy"), 0);
  expect_clean_end();
}

}  // namespace
}  // namespace holdfast
