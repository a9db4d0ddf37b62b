// The newest generation that is clean on every rank, into the state of all.
#pragma once

#include <optional>

#include "declared_state.h"
#include "generation_folder.h"
#include "holdfast/checkpoint/checkpoint_store.h"

namespace holdfast {

// Of one rank.
struct RestoreFrom {
  Collective& collective;
  FileSystem& files;
  GenerationFolder& folder;  // only rank 0 changes anything in it
  const TrainingState& state;
  const DeclaredState& declared;
  const RanksState& ranks;  // on rank 0
  const ReplicaGroups& groups;
};

// Collective: CheckpointStore::restore().
//
// A generation that any rank cannot use is looked through by rank 0. Finds rank 0 a fault, whichever rank's
// part it is in, then the generation is damaged and is set aside. Finds it none, then the others do not see
// what rank 0 sees (a folder that is not shared, a file system that lags behind): it is passed over and stays
// where it is.
Status restore_newest(const RestoreFrom& from, const std::optional<GenerationId>& at_most,
                      RestoredGeneration* out);

}  // namespace holdfast
