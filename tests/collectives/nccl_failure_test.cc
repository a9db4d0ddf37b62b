// The shared list of failures over NCCL: every operation, each way in which NCCL and the device can fail, on
// each rank in turn.
#include <algorithm>
#include <barrier>
#include <latch>
#include <set>
#include <tuple>

#include "collectives/failure_cases.h"
#include "collectives/nccl_ranks.h"

namespace holdfast {
namespace {

using conformance::Operation;
using stand_in::Fault;
using stand_in::Kind;
using std::chrono::milliseconds;

using Calls = std::map<std::string, int>;

constexpr milliseconds kDeadline{150};
constexpr milliseconds kPatience{5'000};

// How often they are called depends on how long things take.
const std::set<std::string> kPolls = {"cudaStreamQuery", "ncclCommGetAsyncError"};

bool is_collective(const std::string& function) {
  return function.starts_with("ncclAll") || function == "ncclBroadcast" || function == "ncclSend" ||
         function == "ncclRecv";
}

// A group that makes `operation` once, and then once more with something wrong.
struct Trial {
  Operation operation;
  int size = 0;
  int failing = 0;
  std::vector<Fault> faults;          // of the failing rank; calls are counted from the second time on
  milliseconds deadline = kPatience;  // of the failing rank
  bool aborted = false;               // the failing rank, from outside, once it is in the first fault's call
  bool absent = false;                // the failing rank does not come, and the others have the deadline

  std::string text;  // of the failing rank's failure
  Calls made;        // by the failing rank, the first time

  void run();

 private:
  bool try_to_run();  // false: a rank was late at the creation, on a machine that is very busy
  void fail(NcclCollective& collective, const Calls& before);
};

void Trial::run() {
  for (int attempt = 0; attempt < 5; ++attempt) {
    if (try_to_run()) return;
  }
  FAIL() << "the group was never there";
}

bool Trial::try_to_run() {
  stand_in::reset();
  Bytes id;
  EXPECT_TRUE(NcclCollective::make_id(&id).ok());
  std::atomic<bool> late{false};
  std::barrier<> together(size);
  std::latch failed(1);
  on_threads(size, [&](int rank) {
    const bool fails = rank == failing;
    const milliseconds mine = fails != absent ? deadline : kPatience;
    std::unique_ptr<NcclCollective> collective;
    together.arrive_and_wait();
    if (!NcclCollective::create(id, rank, size, rank, nccl_options(mine), &collective).ok()) late = true;
    together.arrive_and_wait();
    if (late) return;
    const Calls at_first = stand_in::calls(rank);
    if (!operation.call(*collective).ok()) late = true;
    const Calls before = stand_in::calls(rank);
    if (fails) {
      for (const auto& [function, count] : before) {
        const auto earlier = at_first.find(function);
        made[function] = count - (earlier == at_first.end() ? 0 : earlier->second);
      }
      for (Fault fault : faults) {
        const auto earlier = before.find(fault.function);
        fault.rank = failing;
        fault.call += earlier == before.end() ? 0 : earlier->second;
        stand_in::inject(fault);
      }
    }
    together.arrive_and_wait();
    if (late) return;
    if (fails) {
      if (!absent) fail(*collective, before);
      failed.count_down();
    } else if (absent) {
      conformance::expect_failure(*collective, operation);
    } else {
      // As the watchdogs do it.
      std::jthread watchdog([&] {
        failed.wait();
        collective->abort();
      });
      conformance::expect_failure_by_the_next(*collective, operation);
    }
  });
  return !late;
}

void Trial::fail(NcclCollective& collective, const Calls& before) {
  std::jthread watchdog;
  if (aborted) {
    watchdog = std::jthread([&] {
      const std::string& function = faults.front().function;
      const auto earlier = before.find(function);
      const int calls = earlier == before.end() ? 0 : earlier->second;
      for (int i = 0; i < 5000 && stand_in::calls(failing, function) == calls; ++i)
        std::this_thread::sleep_for(milliseconds(1));
      collective.abort();
    });
  }
  conformance::expect_failure(collective, operation, &text);
}

class NcclFailure : public testing::TestWithParam<std::tuple<Operation, int>> {
 protected:
  // A trial for each rank, with what its calls are without a fault.
  void on_each_rank(const std::function<void(const Trial&)>& body) {
    const auto& [operation, size] = GetParam();
    for (int rank = 0; rank < size; ++rank) {
      SCOPED_TRACE("rank " + std::to_string(rank));
      Trial trial{operation, size, rank, {{"cudaMemcpyAsync", 0, 1, Kind::kError}}, kPatience, false,
                  false,     {},   {}};
      trial.run();
      trial.faults.clear();
      body(trial);
    }
  }

  static void expect_failure(Trial trial, const Fault& fault, const std::string& text) {
    SCOPED_TRACE(fault.function + ", call " + std::to_string(fault.call));
    trial.faults = {fault};
    trial.run();
    EXPECT_NE(trial.text.find(text), std::string::npos) << trial.text;
    expect_clean_end();
  }
};

INSTANTIATE_TEST_SUITE_P(Operations, NcclFailure,
                         testing::Combine(testing::ValuesIn(conformance::operations()),
                                          testing::Values(1, 2, 4)),
                         [](const auto& param) {
                           return std::string(std::get<0>(param.param).name) + "_on_" +
                                  std::to_string(std::get<1>(param.param));
                         });

// Of NCCL and of the device.
TEST_P(NcclFailure, ByAnErrorOfAnyCall) {
  on_each_rank([](const Trial& trial) {
    int tried = 0;
    for (const auto& [function, count] : trial.made) {
      for (int call = 1; call <= (kPolls.contains(function) ? std::min(count, 1) : count); ++call, ++tried) {
        expect_failure(trial, {function, 0, call, Kind::kError}, "injected");
      }
    }
    EXPECT_GE(tried, 5);  // a copy to the device or from it, a collective and both polls
  });
}

TEST_P(NcclFailure, ByAnAsynchronousError) {
  on_each_rank([](const Trial& trial) {
    expect_failure(trial, {"ncclCommGetAsyncError", 0, 1, Kind::kAsyncError},
                   "remote process exited: the last words");
  });
}

TEST_P(NcclFailure, ByTheDeadlineOfACollectiveThatNeverCompletes) {
  on_each_rank([](Trial trial) {
    trial.deadline = kDeadline;
    int tried = 0;
    for (const auto& [function, count] : trial.made) {
      if (!is_collective(function)) continue;
      for (int call = 1; call <= count; ++call, ++tried) {
        expect_failure(trial, {function, 0, call, Kind::kNeverCompletes}, "did not end within 150 ms");
      }
    }
    EXPECT_GE(tried, 1);
  });
}

TEST_P(NcclFailure, ByAnAbortFromAnotherThread) {
  on_each_rank([](Trial trial) {
    trial.aborted = true;
    int tried = 0;
    for (const auto& [function, count] : trial.made) {
      if (!is_collective(function) || count == 0) continue;
      expect_failure(trial, {function, 0, 1, Kind::kNeverCompletes}, "the communicator was aborted");
      ++tried;
    }
    EXPECT_GE(tried, 1);
  });
}

TEST_P(NcclFailure, ByTheDeadlineWhenARankDoesNotCome) {
  if (std::get<1>(GetParam()) == 1) GTEST_SKIP() << "there is nobody to miss";
  on_each_rank([](Trial trial) {
    trial.absent = true;
    trial.deadline = kDeadline;
    trial.run();
    expect_clean_end();
  });
}

}  // namespace
}  // namespace holdfast
