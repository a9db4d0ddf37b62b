// One rank's part of an attempt, up to its own gradients: no collective, no update. Made in training, made
// again on an incident, and made again offline.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "holdfast/tensor_view.h"
#include "train/fault.h"
#include "train/natural_fault_spec.h"
#include "train/workload.h"

namespace holdfast::train {

// What it is made of.
struct AttemptPlan {
  std::uint64_t attempt = 0;
  int rank = 0;                                    // whose it is, for faults
  std::vector<std::vector<std::int64_t>> samples;  // ids, by micro-batch
  std::vector<std::uint64_t> rng_keys;             // by micro-batch
  double denominator = 1.0;                        // of the loss
  double loss_scale = 1.0;
  // Recorded micro-batches in place of the data set's, when not empty.
  std::vector<std::vector<RecordedTensor>> recorded;
};

// Sees it.
class AttemptWatcher {
 public:
  virtual ~AttemptWatcher() = default;
  // Runs `body` unless this attempt has failed already, and keeps what it throws; whether all is well.
  virtual bool run(Stage stage, const std::function<void()>& body) = 0;
  virtual void micro_batch(int index) = 0;
  virtual void tensor(Stage stage, std::string_view name, std::span<const float> values) = 0;
  virtual void loss(float value) = 0;  // of one micro-batch
};

// As if the loss scale were as large as these gradients alone can bear: the largest magnitude comes to lie in
// the upper half of what `dtype` holds, so that two of it do not fit.
void grow_to_the_limit(std::span<float> gradients, DType dtype);

class LocalAttempt {
 public:
  // All must outlive it.
  LocalAttempt(Workload& workload, const FaultInjector& faults,
               const std::vector<NaturalFaultSpec>& natural_faults)
      : workload_(workload), faults_(faults), natural_faults_(natural_faults) {}

  // All micro-batches; their gradients are added to workload.gradients().
  void run(const AttemptPlan& plan, AttemptWatcher& watcher);
  // Loads micro-batch m as run() does, without the faults that are injected into what was loaded.
  void load(const AttemptPlan& plan, int m);

  // Whether plan.attempt is one in which every rank has the same gradients, grown to the limit.
  bool sum_overflow_due(const AttemptPlan& plan) const;

  // Natural faults of `rank`'s micro-batch m on, or off again.
  void set_natural_faults(const AttemptPlan& plan, int m, bool on);

 private:
  void micro_batch(const AttemptPlan& plan, int m, AttemptWatcher& watcher);

  Workload& workload_;
  const FaultInjector& faults_;
  const std::vector<NaturalFaultSpec>& natural_faults_;
};

}  // namespace holdfast::train
