// What the ranks say of their parts, put together by rank 0.
#pragma once

#include <string>
#include <vector>

#include "declared_state.h"
#include "holdfast/checkpoint/generation.h"
#include "holdfast/checkpoint/manifest.pb.h"

namespace holdfast {

// Why a generation cannot be published.
struct Refusal {
  std::string reason;  // "" when it can
  bool non_finite = false;
};

// `reports[r]` is the PartReport of rank r, "" of one with nothing to write. Each part is moved into
// `manifest`, in its order, which also gets the names of the replica groups. The reason is the lowest rank's,
// a value that is not finite before anything else.
Refusal assemble(const std::vector<Bytes>& reports, const RanksState& ranks, const GenerationId& id,
                 Manifest* manifest);

}  // namespace holdfast
