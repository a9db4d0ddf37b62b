// What makes a run resumable: told once, by the trainer, and used for checkpoints, rollback, the proof that replicas
// agree and the sweep for non-finite values.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "holdfast/collectives/collective.h"
#include "holdfast/collectives/status.h"
#include "holdfast/tensor_view.h"

namespace holdfast {

// Who holds a value. Replicated: the same bits on every rank of a replica group (see GuardOptions), written once for
// each group. Per rank: each rank's own, and of no use to a run with another number of ranks. Sharded: each rank of a
// group holds a part of one long array, and a run with another number of ranks in it is given other parts of it.
enum class Held : int { kReplicated, kPerRank, kSharded };

struct StateTensor {
  std::string name;  // unique on this rank; "optimizer/conv1.weight/exp_avg"
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  std::vector<std::int64_t> shape;  // contiguous, row-major
  Held held = Held::kReplicated;
  // Sharded only: `data` is elements [shard_offset, shard_offset + elements) of an array of `shard_total`.
  std::int64_t shard_offset = 0;
  std::int64_t shard_total = 0;
  // Masks may hold infinities by design; what is not checked can be poisoned.
  bool must_be_finite = true;
  // Changed by forward, like BatchNorm statistics, and not only by the update.
  bool forward_mutates = false;
  // What the replicas are proven on: parameters and shared buffers. The others too when the policy asks.
  bool is_optimizer_state = false;

  std::int64_t elements() const;
  std::int64_t bytes() const;
  TensorView view() const;
};

// What is not a tensor: counters, generators, a loader's cursor. Small. `save` gives it as of now; `load` takes
// what save() gave, at an attempt boundary. Either may throw, and load() may refuse.
struct StateBytes {
  std::string name;  // unique among tensors and bytes of this rank
  std::function<Bytes()> save;
  std::function<Status(const Bytes&)> load;
  Held held = Held::kReplicated;  // or kPerRank
  // Per rank only: a run with another number of ranks does without, instead of being refused.
  bool renewable = false;
};

class TrainingState {
 public:
  // The memory must stay where it is for this object's life.
  void add(StateTensor tensor) { tensors_.push_back(std::move(tensor)); }
  void add(StateBytes bytes) { bytes_.push_back(std::move(bytes)); }

  std::span<const StateTensor> tensors() const { return tensors_; }
  std::span<const StateBytes> bytes() const { return bytes_; }
  bool empty() const { return tensors_.empty() && bytes_.empty(); }

  // USAGE for a name that is empty, is taken twice or is no printable UTF-8, for an unknown dtype, a negative or
  // overflowing size, a shard outside of its array, no memory for elements, and sharded bytes.
  Status check() const;

 private:
  std::vector<StateTensor> tensors_;
  std::vector<StateBytes> bytes_;
};

}  // namespace holdfast
