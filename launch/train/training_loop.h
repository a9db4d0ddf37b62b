// The attempts of a run, one after the other.
#pragma once

#include <fmt/format.h>
#include <mpi.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "holdfast/step_guard.h"
#include "train/attempt_times.h"
#include "train/ending.h"
#include "train/gradient_bucket.h"
#include "train/guard_tap.h"
#include "train/local_attempt.h"
#include "train/prepare.h"
#include "train/progress.h"
#include "train/replica.h"
#include "train/sampler.h"

namespace holdfast::train {

class TrainingLoop final : AttemptWatcher {
 public:
  // `guard` is null with --guard off.
  TrainingLoop(const Options& options, MPI_Comm communicator, Collective& collective, Preparation& prepared,
               StepGuard* guard);

  // Collective. With --resume it is the state of a checkpoint afterwards.
  Status register_state();

  // All attempts that are left, and the last decision.
  Ending run();

  // One step, top to bottom. Every rank makes the same sequence of collectives, whatever happens in between:
  // the count of targets, the all-reduces of gradient and loss, decide(), and after APPLY the broadcast of
  // rank 0's buffers.
  Decision attempt();

  std::string digests() { return replica_.digests(); }

  // After run(), for every rank that got there in order. Collective.
  void report();

 private:
  int rank() const { return collective_.rank(); }

  void take_position();
  Decision go_back(const Decision& decision);
  bool all_have_data();
  void keep_ledger();
  void begin();
  void choose_samples();

  // ---- what LocalAttempt shows, with or without the guard
  bool run(Stage stage, const std::function<void()>& body) override {
    tap_.set_stage(stage);
    return run_stage(stage, body);
  }
  void micro_batch(int index) override {
    if (guard_ != nullptr) guard_->micro_batch(index);
  }
  void tensor(Stage stage, std::string_view name, std::span<const float> values) override {
    if (guard_ != nullptr) guard_->observe(stage, name, TensorView::of(values));
  }
  void loss(float value) override {
    loss_ += static_cast<double>(value);
    if (guard_ != nullptr) guard_->observe_loss(static_cast<double>(value));
  }

  void finish_own_gradients();
  void reduce_gradients();
  void inspect_reduced();
  void preview_update();
  Decision decide();
  void apply();
  void observe_written();
  void finish(const Decision& decision);
  Ending abandon(const Decision& decision);

  // Runs one stage of a micro-batch. Under the guard an exception becomes a flag, and the rest of this rank's
  // attempt is left out.
  template <typename Body>
  bool run_stage(Stage stage, Body&& body) {
    if (guard_ != nullptr) return guard_->run(stage, body);
    body();
    return true;
  }

  bool sum_overflow_due() const {
    return std::ranges::any_of(natural_faults_, [&](const NaturalFaultSpec& spec) {
      return spec.sum_overflow() && spec.due(rank(), attempt_, spec.micro);
    });
  }

  bool omitted() const { return std::ranges::count(options_.omitted_updates, attempt_) != 0; }
  double learning_rate() const { return options_.schedule.rate(replica_.updates()); }

  template <typename Element>
  static std::span<Element> part_of(std::span<Element> flat, const BucketSlice& slice) {
    return flat.subspan(static_cast<std::size_t>(slice.offset), static_cast<std::size_t>(slice.count));
  }
  std::span<float> gradient(const BucketSlice& slice) { return part_of(workload_.gradients(), slice); }

  // "conv1.weight/exp_avg"; the parameter itself has no part.
  const std::string& state_name(std::string_view tensor, std::string_view part) {
    name_.assign(tensor);
    if (!part.empty()) name_.append("/").append(part);
    return name_;
  }

  void print_score();
  void print_digests();
  void say(const std::string& line) {
    if (rank() == 0) fmt::print("{}\n", line);
  }

  const Options& options_;
  const MPI_Comm communicator_;
  Collective& collective_;
  Workload& workload_;
  StepGuard* const guard_;
  GuardTap tap_;
  FaultInjector faults_;
  const std::vector<NaturalFaultSpec> natural_faults_;
  LocalAttempt local_;
  Sampler sampler_;
  Sampler rank_0_sampler_;         // for sum-overflow, in which every rank has the same batch
  const std::uint64_t data_ends_;  // this rank has batches for so many attempts; 0 for ever
  Replica replica_;
  GradientBucket bucket_;
  Progress progress_;

  std::uint64_t attempt_ = 0;
  std::uint64_t skips_ = 0;

  // Of the running attempt.
  AttemptPlan plan_;
  double loss_ = 0.0;           // of this rank; after the reduction the mean over the ranks
  double gradient_norm_ = 0.0;  // unscaled; NaN when the reduced gradient is not finite
  UpdateScale update_scale_;
  AttemptTimes times_;
  std::vector<Probe> reduced_;        // of the reduced gradient, by tensor
  std::vector<char> buffers_before_;  // when its update is to be omitted
  std::string name_;                  // see state_name()
};

}  // namespace holdfast::train
