// Ranks as threads, each with its NCCL backend over the stand-in.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "collectives/nccl_stand_in.h"
#include "holdfast/collectives/nccl_collective.h"

namespace holdfast {

inline NcclOptions nccl_options(std::chrono::milliseconds deadline = std::chrono::minutes(1)) {
  NcclOptions options;
  options.deadline = deadline;
  return options;
}

inline void on_threads(int size, const std::function<void(int)>& body) {
  std::vector<std::jthread> threads;
  for (int r = 0; r < size; ++r) threads.emplace_back([&, r] { body(r); });
}

// Calls body(collective) on each of `size` ranks; node_of(rank) tells nodes apart.
inline void run_nccl(int size, const std::function<void(NcclCollective&)>& body,
                     const std::function<std::string(int)>& node_of = {}) {
  Bytes id;
  ASSERT_TRUE(NcclCollective::make_id(&id).ok());
  on_threads(size, [&](int rank) {
    NcclOptions options = nccl_options();
    if (node_of) options.node = node_of(rank);
    std::unique_ptr<NcclCollective> collective;
    const Status status = NcclCollective::create(id, rank, size, rank, options, &collective);
    ASSERT_TRUE(status.ok()) << status.to_string();
    body(*collective);
  });
}

// Every call was one that may be made, and everything was given back.
inline void expect_clean_end() {
  EXPECT_EQ(stand_in::misuse(), std::vector<std::string>());
  EXPECT_EQ(stand_in::held(), 0u);
}

// Waits for it.
inline bool within(std::chrono::milliseconds time, const std::function<bool()>& holds) {
  using Clock = std::chrono::steady_clock;
  for (const auto until = Clock::now() + time; Clock::now() < until;) {
    if (holds()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return holds();
}
inline bool soon(const std::function<bool()>& holds) { return within(std::chrono::seconds(5), holds); }

// The next call of `function` on this rank, but `ahead` others, goes wrong.
inline void inject_next(const std::string& function, int rank, stand_in::Kind kind, int ahead = 0) {
  stand_in::inject({function, rank, stand_in::calls(rank, function) + 1 + ahead, kind});
}

class NcclTest : public testing::Test {
 protected:
  void SetUp() override { stand_in::reset(); }
};

}  // namespace holdfast
