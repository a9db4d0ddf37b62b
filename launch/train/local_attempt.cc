#include "train/local_attempt.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "holdfast/scan.h"

namespace holdfast::train {

void grow_to_the_limit(std::span<float> gradients, DType dtype) {
  const double abs_max = scan(TensorView::of(gradients)).abs_max;
  if (abs_max == 0) return;
  const double growth = std::exp2(std::floor(std::log2(dtype_largest(dtype) / abs_max)));
  for (float& value : gradients) value = static_cast<float>(value * growth);
}

bool LocalAttempt::sum_overflow_due(const AttemptPlan& plan) const {
  return std::ranges::any_of(natural_faults_, [&](const NaturalFaultSpec& spec) {
    return spec.sum_overflow() && spec.due(plan.rank, plan.attempt, spec.micro);
  });
}

void LocalAttempt::run(const AttemptPlan& plan, AttemptWatcher& watcher) {
  for (int m = 0; m < static_cast<int>(plan.rng_keys.size()); ++m) micro_batch(plan, m, watcher);
}

void LocalAttempt::load(const AttemptPlan& plan, int m) {
  const auto at = static_cast<std::size_t>(m);
  if (plan.recorded.empty()) return workload_.load(plan.samples[at], plan.rng_keys[at]);
  const Status loaded = workload_.load_recorded(plan.recorded[at], plan.rng_keys[at]);
  if (!loaded.ok()) throw std::runtime_error(loaded.message());
}

void LocalAttempt::micro_batch(const AttemptPlan& plan, int m, AttemptWatcher& watcher) {
  watcher.micro_batch(m);
  set_natural_faults(plan, m, true);
  const auto corrupt = [&](Stage stage, std::string_view tensor, std::span<float> values) {
    faults_.corrupt(stage, plan.attempt, m, tensor, values.data(), static_cast<std::int64_t>(values.size()));
  };
  const bool loaded = watcher.run(Stage::kInput, [&] {
    faults_.at(Stage::kInput, plan.attempt, m);
    load(plan, m);
    corrupt(Stage::kInput, "input", workload_.input());
  });
  if (loaded) watcher.tensor(Stage::kInput, "input", workload_.input());

  const bool forwarded = watcher.run(Stage::kForward, [&] {
    faults_.at(Stage::kForward, plan.attempt, m);
    workload_.forward();
    corrupt(Stage::kForward, "output", workload_.output());
  });
  if (forwarded) watcher.tensor(Stage::kForward, "output", workload_.output());

  const bool judged = watcher.run(Stage::kLoss, [&] {
    faults_.at(Stage::kLoss, plan.attempt, m);
    workload_.compute_loss(plan.denominator);
    corrupt(Stage::kLoss, "loss", workload_.loss());
  });
  if (judged) watcher.loss(workload_.loss()[0]);

  watcher.run(Stage::kBackward, [&] {
    faults_.at(Stage::kBackward, plan.attempt, m);
    workload_.backward(static_cast<float>(plan.loss_scale));
    for (const BucketSlice& slice : workload_.layout()) {
      corrupt(Stage::kBackward, slice.tensor,
              workload_.gradients().subspan(static_cast<std::size_t>(slice.offset),
                                            static_cast<std::size_t>(slice.count)));
    }
  });
  set_natural_faults(plan, m, false);
}

void LocalAttempt::set_natural_faults(const AttemptPlan& plan, int m, bool on) {
  for (const NaturalFaultSpec& spec : natural_faults_) {
    if (spec.sum_overflow() || spec.fault == NaturalFault::kDeadUnit || !spec.due(plan.rank, plan.attempt, m))
      continue;
    workload_.set_fault(*spec.fault, on);
  }
}

}  // namespace holdfast::train
