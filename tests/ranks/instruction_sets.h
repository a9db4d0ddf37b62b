// Runs something on each instruction set that was compiled and that this processor has.
#pragma once

#include <hwy/targets.h>

#include <cstdint>

namespace holdfast {

template <typename Body>
void on_each_instruction_set(Body body) {
  for (const std::int64_t target : hwy::SupportedAndGeneratedTargets()) {
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(target);
    body(hwy::TargetName(target));
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

}  // namespace holdfast
