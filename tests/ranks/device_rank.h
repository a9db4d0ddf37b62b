// A rank whose gradient is scanned, and whose update is left out, on its device: StepGuard and CudaAttempt
// over NCCL's stand-in. After each attempt it is checked that the decision, the flag and the update say the
// same.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "collectives/nccl_ranks.h"
#include "holdfast/cuda_attempt.h"
#include "ranks/cuda_stand_in.h"
#include "ranks/guarded_ranks.h"

namespace holdfast {

struct DeviceRank {
  static constexpr std::uint32_t kNoUpdate = 7;
  static constexpr std::int64_t kOffset = 1000;  // of the gradient's piece

  DeviceRank(NcclCollective& its, Collective& of_guard, const GuardOptions& options)
      : rank(its.rank()),
        collective(its),
        stream(stand_in::make_stream(its.rank())),
        guard(create_guard(of_guard, options)) {
    void* memory = nullptr;
    EXPECT_EQ(cudaMallocHost(&memory, sizeof(*seen)), cudaSuccess);
    seen = static_cast<std::uint32_t*>(memory);
    EXPECT_TRUE(CudaAttempt::create(collective, stream, &device).ok());
    const CudaTensor tensors[] = {{"finite", TensorView::of(others)},
                                  {"weights", TensorView::of(gradient), kOffset}};
    EXPECT_TRUE(device->add_scan(Stage::kBackward, tensors, &scan).ok());
    // All that a kernel of the update would see: the flag, when the stream comes to it.
    device->set_update([this](const std::uint32_t* skip_flag) {
      if (fail_to_enqueue) return fail_to_enqueue();
      EXPECT_EQ(cudaMemcpyAsync(seen, skip_flag, sizeof(*seen), cudaMemcpyDeviceToHost, stream), cudaSuccess);
      return Status();
    });
  }
  ~DeviceRank() {
    stand_in::drain();
    device.reset();
    EXPECT_EQ(cudaFreeHost(seen), cudaSuccess);
  }

  Decision attempt(
      const std::function<void()>& work = [] {}, const std::function<void()>& update = [] {}) {
    *seen = kNoUpdate;
    guard->begin();
    work();
    if (scans) device->scan(scan);
    const Decision decision = guard->decide(*device);
    stand_in::drain();
    EXPECT_EQ(*collective.device_skip_flag(), decision.apply() ? 0u : 1u) << decision.reason;
    const bool does_update = *seen == 0 || (fail_to_enqueue && decision.apply());
    EXPECT_EQ(does_update, decision.apply()) << "rank " << rank << " saw " << *seen;
    if (decision.apply()) {
      guard->update([&] {
        ++updates;
        update();
      });
    }
    if (decision.rolls_back()) {
      EXPECT_TRUE(guard->roll_back().rolls_back());
    } else {
      guard->finish();
    }
    return decision;
  }

  const int rank;
  NcclCollective& collective;
  const cudaStream_t stream;
  const std::unique_ptr<StepGuard> guard;
  std::unique_ptr<CudaAttempt> device;
  const std::vector<float> others = std::vector<float>(30, 2.0f);
  std::vector<float> gradient = std::vector<float>(100, 1.0f);
  std::size_t scan = 0;
  bool scans = true;
  std::uint32_t* seen = nullptr;  // the flag as the update found it; kNoUpdate when none was enqueued
  std::function<Status()> fail_to_enqueue;
  int updates = 0;
};

inline void run_devices(int ranks, const GuardOptions& options,
                        const std::function<void(DeviceRank&)>& body) {
  run_nccl(ranks, [&](NcclCollective& collective) {
    DeviceRank device(collective, collective, options);
    if (device.guard) body(device);
  });
}

}  // namespace holdfast
