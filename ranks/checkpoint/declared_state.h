// What a trainer has told of its state, as a manifest would tell it, so that ranks and generations can be
// compared.
#pragma once

#include <string>
#include <vector>

#include "holdfast/checkpoint/manifest.pb.h"
#include "holdfast/collectives/collective.h"
#include "holdfast/replica_groups.h"
#include "holdfast/training_state.h"
#include "sharded_arrays.h"

namespace holdfast {

// Of one rank. Entries without begin and digests; of bytes without a size, which may change.
struct DeclaredState {
  Part replicated;
  Part per_rank;
  Part sharded;
};
Status declare(const TrainingState& state, DeclaredState* out);

// The first entry of which `mine` has another kind than `others`, or which only one of them has, in a
// sentence that calls them so; "" when there is none. The order does not matter, nor do digests and the sizes
// of bytes.
std::string difference(const Part& mine, const Part& others, const std::string& call_mine,
                       const std::string& call_others);

// Of all ranks. On rank 0.
struct RanksState {
  std::vector<bool>
      writes;  // by rank: it has something of its own to write, or is its group's first and shares something
  ShardedArrays arrays;
  ReplicaGroups groups{0};
};

// Collective. USAGE, naming the first rank that has another replicated state than the first of its replica
// group, and for sharded arrays that the ranks of a group together do not hold, every element once.
Status agree_on_state(Collective& collective, const ReplicaGroups& groups, const DeclaredState& mine,
                      RanksState* out);

}  // namespace holdfast
