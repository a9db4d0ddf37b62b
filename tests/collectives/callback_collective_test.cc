#include "holdfast/collectives/callback_collective.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <tuple>

#include "collectives/conformance.h"
#include "collectives/failure_cases.h"
#include "collectives/gather_cases.h"
#include "collectives/thread_callbacks.h"
#include "holdfast/collectives/verdict.h"

extern "C" holdfast_callbacks callbacks_of_one_rank(std::size_t* values_summed);

namespace holdfast {
namespace {

using std::chrono::milliseconds;

std::string kind(bool own_functions) { return own_functions ? "own_functions" : "all_reduce_alone"; }

class CallbackConformance : public testing::TestWithParam<std::tuple<conformance::Case, int, bool>> {};

TEST_P(CallbackConformance, Holds) {
  const auto& [test, size, own_functions] = GetParam();
  ThreadTransport(size, own_functions).run(test.on_each_rank);
}

INSTANTIATE_TEST_SUITE_P(Backends, CallbackConformance,
                         testing::Combine(testing::ValuesIn(conformance::cases()),
                                          testing::Values(1, 2, 3, 4, 8), testing::Bool()),
                         [](const auto& param) {
                           return std::string(std::get<0>(param.param).name) + "_on_" +
                                  std::to_string(std::get<1>(param.param)) + "_" +
                                  kind(std::get<2>(param.param));
                         });

class CallbackGather : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Kinds, CallbackGather, testing::Bool(),
                         [](const auto& param) { return kind(param.param); });

TEST_P(CallbackGather, KeepsSoManyOfEachNode) {
  const auto node_of = [](int r) { return r % 3; };  // a node's ranks need not be neighbours
  ThreadTransport(8, GetParam())
      .run([&](Collective& collective) { expect_capped_gathers(collective, node_of); },
           [&](int r) { return static_cast<std::uint64_t>(node_of(r)) + 1; });
}

TEST_P(CallbackGather, WithoutNodeNumbersTheHostIsTheNode) {
  ThreadTransport(3, GetParam())
      .run([](Collective& collective) { expect_capped_gathers(collective, [](int) { return 0; }); },
           [](int) { return 0u; });
}

// The chunks in which bytes are moved end in the middle of messages and of values.
TEST(CallbackCollective, MessagesAcrossChunksArriveWhole) {
  constexpr std::size_t kChunk = CallbackCollective::kChunkValues * 8;
  for (const std::size_t size : {kChunk - 1, kChunk, kChunk + 1, 3 * kChunk + 5}) {
    ThreadTransport(3, false).run([&](Collective& collective) {
      conformance::expect_gather(collective, [&](int r) {
        return conformance::random_bytes(size + static_cast<std::size_t>(r) * 3,
                                         static_cast<std::uint64_t>(r));
      });
      conformance::expect_broadcast(collective, conformance::random_bytes(size, 9));
    });
  }
}

TEST(CallbackCollective, ACleanAttemptIsOneCall) {
  ThreadTransport transport(2, false);
  transport.run([&](Collective& collective) {
    Record record;
    EXPECT_TRUE(collective.reduce(record).ok());
    EXPECT_EQ(transport.calls(collective.rank()), 1);
  });
}

TEST(CallbackCollective, CanBeWrittenInC) {
  std::size_t values_summed = 0;
  std::unique_ptr<Collective> collective;
  ASSERT_TRUE(CallbackCollective::create(callbacks_of_one_rank(&values_summed), &collective).ok());
  Record record = conformance::contribution(0, 1);
  EXPECT_TRUE(collective->reduce(record).ok());
  EXPECT_EQ(record, conformance::contribution(0, 1));
  EXPECT_EQ(values_summed, Record::kLanes);
}

TEST(CallbackCollective, WhatCannotBeAGroupIsRefused) {
  std::size_t ignored = 0;
  const holdfast_callbacks good = callbacks_of_one_rank(&ignored);
  const auto message = [](const holdfast_callbacks& callbacks) {
    std::unique_ptr<Collective> collective;
    const Status status = CallbackCollective::create(callbacks, &collective);
    EXPECT_EQ(status.code(), StatusCode::kUsage);
    EXPECT_EQ(collective, nullptr);
    return status.message();
  };
  holdfast_callbacks bad = good;
  bad.struct_bytes = 8;
  EXPECT_NE(message(bad).find("struct_bytes is 8"), std::string::npos);
  bad = good;
  bad.rank = 1;
  EXPECT_EQ(message(bad), "holdfast_callbacks: there is no rank 1 among 1");
  bad.rank = -1;
  EXPECT_EQ(message(bad), "holdfast_callbacks: there is no rank -1 among 1");
  bad = good;
  bad.all_reduce = nullptr;
  EXPECT_EQ(message(bad), "holdfast_callbacks: all_reduce is required");
}

// The callbacks that an operation is made of, whoever moves the bytes.
int calls_of(const conformance::Operation& operation) {
  const std::string name = operation.name;
  return name == "reduce" || name == "agree_on_status" ? 1 : 2;
}

class FailingCallback : public testing::TestWithParam<std::tuple<conformance::Operation, bool>> {};
INSTANTIATE_TEST_SUITE_P(Operations, FailingCallback,
                         testing::Combine(testing::ValuesIn(conformance::operations()), testing::Bool()),
                         [](const auto& param) {
                           return std::string(std::get<0>(param.param).name) + "_" +
                                  kind(std::get<1>(param.param));
                         });

// On one rank, each callback of an operation in turn, in each way. The others, left alone, fail by the
// transport's patience.
TEST_P(FailingCallback, FailsTheGroupAndIsNotCalledAgain) {
  const auto& [operation, own_functions] = GetParam();
  const std::vector<ThreadTransport::Before> ways = {
      [](int, const std::string&) { return 7; },
      [](int, const std::string&) -> int { throw std::runtime_error("the cable is out"); },
      [](int, const std::string&) -> int { throw 5; },
  };
  for (const auto& way : ways) {
    for (const int failing : {0, 1}) {
      for (int n = 1; n <= calls_of(operation); ++n) {
        ThreadTransport transport(2, own_functions, milliseconds(100));
        transport.before(failing,
                         [&](int call, const std::string& name) { return call == n ? way(call, name) : 0; });
        transport.run([&](Collective& collective) {
          conformance::expect_failure(collective, operation);
          if (collective.rank() == failing) {
            EXPECT_EQ(transport.calls(failing), n);
          }
        });
      }
    }
  }
}

TEST(FailingCallbackText, SaysWhichCallbackAndHow) {
  const auto failure = [](const ThreadTransport::Before& way) {
    ThreadTransport transport(1, false);
    transport.before(0, way);
    std::string message;
    transport.run([&](Collective& collective) {
      Record record;
      message = collective.reduce(record).to_string();
    });
    return message;
  };
  EXPECT_EQ(failure([](int, const std::string&) { return 7; }),
            "RANK_MISSING (84): all_reduce callback returned 7");
  EXPECT_EQ(failure([](int, const std::string&) { return 11; }),
            "RANK_MISSING (84): all_reduce callback returned 11: a rank did not come");
  EXPECT_EQ(failure([](int, const std::string&) -> int { throw std::runtime_error("the cable is out"); }),
            "RANK_MISSING (84): all_reduce callback threw: the cable is out");
  EXPECT_EQ(failure([](int, const std::string&) -> int { throw 5; }),
            "RANK_MISSING (84): all_reduce callback threw an exception of unknown type");
}

TEST(CallbackCollective, ALateCallbackIsWaitedFor) {
  ThreadTransport transport(3, false);
  transport.before(1, [](int, const std::string&) {
    std::this_thread::sleep_for(milliseconds(20));
    return 0;
  });
  transport.run([](Collective& collective) {
    for (int round = 0; round < 5; ++round) conformance::expect_reduce(collective, round);
  });
}

// It says that all is well, and has summed nothing: no verdict may come of it, and no wild allocation.
TEST(CallbackCollective, OneThatDoesNotSumIsFoundOut) {
  holdfast_callbacks lying{};
  lying.struct_bytes = sizeof lying;
  lying.rank = 0;
  lying.size = 2;
  lying.all_reduce = [](void*, std::uint64_t* values, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) values[i] = ~std::uint64_t{0} / 3;
    return 0;
  };
  std::unique_ptr<Collective> collective;
  ASSERT_TRUE(CallbackCollective::create(lying, &collective).ok());
  std::vector<Bytes> all;
  EXPECT_EQ(collective->gather("mine", &all).code(), StatusCode::kRankMissing);

  lying.all_reduce = [](void*, std::uint64_t*, std::size_t) { return 0; };
  ASSERT_TRUE(CallbackCollective::create(lying, &collective).ok());
  Record record;
  record.set_participant(0);
  EXPECT_TRUE(collective->reduce(record).ok());
  EXPECT_NE(judge(record, 2).kind, Verdict::Kind::kClean);
}

}  // namespace
}  // namespace holdfast
