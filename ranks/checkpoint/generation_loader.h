// One generation into one rank's state.
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "declared_state.h"
#include "holdfast/coord/storage/file_system.h"
#include "part_file.h"

namespace holdfast {

// Who loads a generation: a rank of a run with these replica groups.
struct Loading {
  int rank;
  const ReplicaGroups& groups;
};

// USAGE, naming the first difference, unless the generation has the same replica groups, by name, and holds
// what this rank has declared: the same replicated state of its group and, from a run of as many ranks, the
// same state of its own. A run of another number of ranks, and a rank that is in another group by now, can
// use neither its own nor the generation's per-rank state. Sharded arrays are for rank 0 to compare.
Status check_match(const DeclaredState& mine, const Manifest& manifest, const Loading& loading);

class GenerationLoader {
 public:
  // All must outlive it; `manifest` is one that check_match() took.
  GenerationLoader(FileSystem& files, std::string folder, const Manifest& manifest,
                   const TrainingState& state, const Loading& loading);

  // Reads all tensors into their memory, and the bytes for load_bytes(). Sharded ones are put together from
  // the parts of all ranks that overlap. INTERNAL for what is not there, not whole or not finite; the state
  // is undefined then.
  Status read();
  // Calls the load()s. USAGE when one refuses, INTERNAL when one throws.
  Status load_bytes() const;

 private:
  bool is_needed(const Part& part, const TensorEntry& entry) const;
  Status read_part(const Part& part);
  Status read_entry(PartReader& reader, int i);
  Status read_shard(PartReader& reader, int i, const StateTensor& tensor);
  Status read_into(PartReader& reader, int i, std::span<std::byte> to);

  FileSystem& files_;
  const std::string folder_;
  const Manifest& manifest_;
  const int rank_;
  const std::optional<std::uint32_t> group_;                // of this rank, in the manifest
  const bool same_place_;                                   // the generation's per-rank state is this rank's
  std::map<std::string_view, const StateTensor*> tensors_;  // of this rank, by name
  std::map<std::string_view, const StateBytes*> bytes_;
  std::map<std::string, Bytes> read_bytes_;
  std::vector<std::byte> scratch_;  // another rank's shard, until its digest is known to be right
};

}  // namespace holdfast
