// Everything that can be wrong before the first step, checked on each rank without talking to the others.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "train/fault.h"
#include "train/natural_fault_spec.h"
#include "train/options.h"
#include "train/workload.h"

namespace holdfast::train {

struct Preparation {
  std::unique_ptr<Workload> workload;
  std::vector<Fault> faults;                     // resolved
  std::vector<NaturalFaultSpec> natural_faults;  // possible
  std::string policy;                            // text of the policy file
};

// Without data, when options.data is empty: for batches that are recorded.
Status make_workload(const Options& options, std::unique_ptr<Workload>* out);

// Where faults can strike in a run of so many attempts.
FaultSurface fault_surface(const Options& options, Workload& workload, int world_size,
                           std::uint64_t attempts);

// Reads policy and data, makes the model, and checks that every fault can happen. USAGE, naming file and
// record or option, for what cannot be taken.
Status prepare(const Options& options, int world_size, Preparation* out);

}  // namespace holdfast::train
