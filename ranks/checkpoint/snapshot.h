// A copy of what this rank writes, so that training goes on while it is written.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "holdfast/training_state.h"
#include "part_file.h"

namespace holdfast {

// One thread at a time.
class Snapshot {
 public:
  // `state` must outlive it. The first rank of a replica group writes the replicated state too.
  Snapshot(const TrainingState& state, bool with_replicated);

  // Whether there is anything of that kind to write. Does not change.
  bool has_replicated() const { return has_replicated_; }
  bool has_own() const { return has_own_; }

  // The tensors as of now, and what the state's save()s give. The memory is allocated with the first call and
  // used again by later ones. INTERNAL, saying whose, for an exception of a save() and when there is no
  // memory.
  Status take();

  // As of the last take(); until the next one.
  std::uint64_t bytes() const;
  std::span<const PartTensor> replicated() const { return replicated_; }
  std::span<const PartTensor> own() const { return own_; }

 private:
  struct Free {
    void operator()(std::byte* memory) const;
  };

  bool is_mine(Held held) const { return with_replicated_ || held != Held::kReplicated; }
  std::size_t tensor_bytes() const;  // each from a cache line on
  void allocate();
  void copy_tensors();
  Status copy_bytes();
  std::vector<PartTensor>& part_of(Held held) { return held == Held::kReplicated ? replicated_ : own_; }

  const TrainingState& state_;
  const bool with_replicated_;
  bool has_replicated_ = false;
  bool has_own_ = false;
  std::unique_ptr<std::byte, Free> memory_;
  std::vector<Bytes> saved_;  // what the save()s gave
  std::vector<PartTensor> replicated_;
  std::vector<PartTensor> own_;
};

}  // namespace holdfast
