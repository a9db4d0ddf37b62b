// Field case 18: buffers that forward mutates are as before the attempt, unless it was applied.
#include <gtest/gtest.h>

#include <bit>
#include <stdexcept>

#include "ranks/guarded_ranks.h"

namespace holdfast {
namespace {

struct BatchNorm {
  std::vector<float> mean = {0.25f, -0.0f, 1e-40f};
  double variance = 1;

  void protect_with(StepGuard& guard) {
    guard.protect(mean.data(), mean.size() * sizeof(float));
    guard.protect(&variance, sizeof(variance));
  }
  void forward(float input) {
    for (float& value : mean) value += input;
    variance *= 2;
  }
  // Bits, since NaN differs from itself and -0 equals 0.
  std::vector<std::uint64_t> bits() const {
    std::vector<std::uint64_t> all = {std::bit_cast<std::uint64_t>(variance)};
    for (const float value : mean) all.push_back(std::bit_cast<std::uint32_t>(value));
    return all;
  }
};

TEST(StepGuardBuffers, AreKeptOnApplyAndRestoredOnSkip) {
  run_guarded(4, guard_options(), [](StepGuard& guard, int rank) {
    BatchNorm norm;
    norm.protect_with(guard);
    for (int a = 0; a < 6; ++a) {
      const auto before = norm.bits();
      std::vector<std::uint64_t> after_forward;
      const Decision decision = attempt(guard, [&] {
        norm.forward(a == 2 && rank == 0 ? kNanF : 1.0f);
        after_forward = norm.bits();
        observe_values(guard, Stage::kForward, "mean", norm.mean);
      });
      EXPECT_EQ(decision.apply(), a != 2);
      EXPECT_EQ(norm.bits(), a == 2 ? before : after_forward) << "rank " << rank << ", attempt " << a;
    }
  });
}

// The optimizer of an attempt that is applied sees the new buffers; one that is not finds the old ones at
// once.
TEST(StepGuardBuffers, AreRestoredBeforeDecideReturns) {
  run_guarded(2, guard_options(), [](StepGuard& guard, int rank) {
    BatchNorm norm;
    norm.protect_with(guard);
    const auto before = norm.bits();
    guard.begin();
    norm.forward(3);
    observe_values(guard, Stage::kLoss, "loss", {rank == 1 ? kNanF : 1});
    static_cast<void>(guard.decide());
    EXPECT_EQ(norm.bits(), before);
    guard.finish();
    EXPECT_EQ(norm.bits(), before);
  });
}

TEST(StepGuardBuffers, AreRestoredWhenTheRunIsAbortedOrStopped) {
  for (const int how : {0, 1, 2}) {
    run_guarded(2, guard_options("on_first: ABORT"), [&](StepGuard& guard, int rank) {
      BatchNorm norm;
      norm.protect_with(guard);
      const auto before = norm.bits();
      const Decision decision = attempt(guard, [&] {
        norm.forward(3);
        if (rank == 1 && how == 0) observe_values(guard, Stage::kLoss, "loss", {kInfF});
        if (rank == 1 && how == 1) guard.run(Stage::kForward, [] { throw std::runtime_error("x"); });
        if (rank == 1 && how == 2) guard.request_stop();
      });
      EXPECT_TRUE(decision.ends_run());
      EXPECT_EQ(norm.bits(), before) << how;
    });
  }
}

TEST(StepGuardBuffers, AreRestoredToWhatTheyWereAtBeginNotToAnEarlierAttempt) {
  run_guarded(1, guard_options(), [](StepGuard& guard, int) {
    BatchNorm norm;
    norm.protect_with(guard);
    attempt(guard, [&] { norm.forward(1); });
    norm.variance = 77;  // the trainer's own business, between attempts
    const auto before = norm.bits();
    attempt(guard, [&] {
      norm.forward(1);
      observe_values(guard, Stage::kLoss, "loss", {kNanF});
    });
    EXPECT_EQ(norm.bits(), before);
  });
}

TEST(StepGuardBuffers, ThatHoldNanBitsAreRestoredBitByBit) {
  run_guarded(1, guard_options(), [](StepGuard& guard, int) {
    std::vector<std::uint32_t> bits = {0x7f800001u, 0xffc12345u, 0x80000000u};
    const auto before = bits;
    guard.protect(bits.data(), bits.size() * 4);
    attempt(guard, [&] {
      bits.assign(3, 0);
      observe_values(guard, Stage::kLoss, "loss", {kNanF});
    });
    EXPECT_EQ(bits, before);
  });
}

TEST(StepGuardBuffers, MayBeEmpty) {
  run_guarded(1, guard_options(), [](StepGuard& guard, int) {
    guard.protect(nullptr, 0);
    EXPECT_TRUE(attempt(guard, [] {}).apply());
    EXPECT_EQ(attempt(guard, [&] { observe_values(guard, Stage::kLoss, "loss", {kNanF}); }).action,
              Action::kSkip);
  });
}

}  // namespace
}  // namespace holdfast
