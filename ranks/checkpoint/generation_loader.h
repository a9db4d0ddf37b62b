// One generation into one rank's state.
#pragma once

#include <cstddef>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "declared_state.h"
#include "holdfast/coord/storage/file_system.h"
#include "part_file.h"

namespace holdfast {

// USAGE, naming the first difference, unless the generation holds what this rank of `ranks` has declared: the
// same replicated state and, from a run of as many ranks, the same state of its own. A run of another number
// of ranks can use neither its own nor the generation's per-rank state. Sharded arrays are for rank 0 to
// compare.
Status check_match(const DeclaredState& mine, const Manifest& manifest, int rank, int ranks);

class GenerationLoader {
 public:
  // All must outlive it; `manifest` is one that check_match() took.
  GenerationLoader(FileSystem& files, std::string folder, const Manifest& manifest,
                   const TrainingState& state, int rank, int ranks);

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
  const std::uint32_t ranks_;                               // of this run
  std::map<std::string_view, const StateTensor*> tensors_;  // of this rank, by name
  std::map<std::string_view, const StateBytes*> bytes_;
  std::map<std::string, Bytes> read_bytes_;
  std::vector<std::byte> scratch_;  // another rank's shard, until its digest is known to be right
};

}  // namespace holdfast
