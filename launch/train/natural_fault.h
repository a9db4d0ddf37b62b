// Natural faults: set-ups in which a non-finite value arises by itself, the way it does in practice, in a
// stage that is known beforehand and in none before it. Nothing is written into a tensor.
#pragma once

#include <array>
#include <bitset>
#include <cstddef>
#include <string_view>

#include "holdfast/collectives/record.h"

namespace holdfast::train {

enum class NaturalFault : int {
  kCorruptRecord,
  kActivationOverflow,
  kEmptyTargetMask,
  kMaskedAttentionRow,
  kDroppedSquareRoot,
  kDeadUnit
};

struct NaturalFaultInfo {
  NaturalFault fault;
  std::string_view name;  // on the command line
  Stage stage;            // where the first non-finite value is expected
  std::string_view what;  // one line for people
};

inline constexpr std::array<NaturalFaultInfo, 6> kNaturalFaults = {{
    {NaturalFault::kCorruptRecord, "corrupt-record", Stage::kInput,
     "a record of the batch is divided by its scale or length, which reads 0"},
    {NaturalFault::kActivationOverflow, "activation-overflow", Stage::kForward,
     "two layers' weights have grown so much that their product leaves fp32's range"},
    {NaturalFault::kEmptyTargetMask, "empty-target-mask", Stage::kLoss,
     "no target of the micro-batch counts: with a local denominator the loss is 0/0"},
    {NaturalFault::kMaskedAttentionRow, "masked-attention-row", Stage::kBackward,
     "an attention row is masked altogether; its output is dropped, but not from the gradient"},
    {NaturalFault::kDroppedSquareRoot, "dropped-square-root", Stage::kBackward,
     "roots at 0 are dropped from the output, but their infinite slope not from the gradient"},
    {NaturalFault::kDeadUnit, "dead-unit", Stage::kOptimizer,
     "a unit's gradients are exactly 0: AdamW with --eps 0 divides 0 by 0"},
}};
inline constexpr std::size_t kNaturalFaultCount = kNaturalFaults.size();

inline const NaturalFaultInfo& natural_fault_info(NaturalFault fault) {
  return kNaturalFaults[static_cast<std::size_t>(fault)];
}

// False when there is no such name.
inline bool parse_natural_fault(std::string_view name, NaturalFault* fault) {
  for (const NaturalFaultInfo& info : kNaturalFaults) {
    if (info.name != name) continue;
    *fault = info.fault;
    return true;
  }
  return false;
}

// The faults that are on.
class NaturalFaults {
 public:
  bool on(NaturalFault fault) const { return on_[static_cast<std::size_t>(fault)]; }
  void set(NaturalFault fault, bool on) { on_[static_cast<std::size_t>(fault)] = on; }

 private:
  std::bitset<kNaturalFaultCount> on_;
};

}  // namespace holdfast::train
