// Natural faults on the command line: NAME[,key=value...], e.g. activation-overflow,rank=1,attempt=20.
//
//   attempt=A | every=K   in attempt A (default 0), or in every K-th: K-1, 2K-1, ...
//   rank=R|all            default: rank 0; sum-overflow and dead-unit concern all ranks
//   micro=M               micro-batch, default 0
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "holdfast/collectives/status.h"
#include "train/natural_fault.h"

namespace holdfast::train {

struct NaturalFaultSpec {
  std::string text;                   // as it was written
  std::optional<NaturalFault> fault;  // none: sum-overflow, which the trainer sets up, not the workload
  std::optional<int> rank = 0;        // every rank when empty
  std::uint64_t attempt = 0;
  std::uint64_t every = 0;  // when not 0, instead of `attempt`
  int micro = 0;

  bool sum_overflow() const { return !fault.has_value(); }
  bool due(int of_rank, std::uint64_t at_attempt, int at_micro) const;
};

// USAGE with what is wrong in it.
Status parse_natural_fault_spec(const std::string& text, NaturalFaultSpec* out);

// The names with what they do, one a line, for --help.
std::string natural_fault_help();

}  // namespace holdfast::train
