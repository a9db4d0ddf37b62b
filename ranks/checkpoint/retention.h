// Which generations are kept. Pure functions, of what is on disk and the options alone.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "holdfast/checkpoint/checkpoint_store.h"

namespace holdfast {

struct StoredGeneration {
  GenerationId id;
  std::uint64_t bytes = 0;  // of its files
};

// Why a generation of `bytes` must not be published beside `stored` (oldest first); "" when it may. The
// newest older one stays until the new one is on disk, whatever the quota, so both have to fit.
std::string quota_refusal(std::span<const StoredGeneration> stored, std::uint64_t bytes,
                          const CheckpointOptions& options);

// Of `stored` (oldest first, the newest just published): what is to be removed, oldest first. Kept are the
// newest `keep` and each that is_kept_for_good(). Then, oldest first, as many of these go as it takes to get
// within the quota, but neither of the two newest: that both fit was seen to by quota_refusal().
std::vector<GenerationId> generations_to_remove(std::span<const StoredGeneration> stored,
                                                const CheckpointOptions& options);

// One in `keep_every`. By its attempt, so that a run that was restarted, or that refused one, needs no memory
// of how many it has published.
bool is_kept_for_good(const GenerationId& id, const CheckpointOptions& options);

}  // namespace holdfast
