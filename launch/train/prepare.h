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

// Reads policy and data, makes the model, and checks that every fault can happen. USAGE, naming file and
// record or option, for what cannot be taken.
Status prepare(const Options& options, int world_size, Preparation* out);

}  // namespace holdfast::train
