// What one rank holds of the model in training: parameters and buffers, optimizer, moving average, counters.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "train/optimizer.h"
#include "train/options.h"
#include "train/workload.h"

namespace holdfast::train {

class Replica {
 public:
  // Collective: every rank starts from rank 0's parameters.
  Replica(const Options& options, Workload& workload, MPI_Comm communicator);

  // The optimizer's update of all tensors, and the moving average's. Local.
  void update(const UpdateScale& scale);

  // Every rank gets rank 0's forward-mutated buffers. Collective.
  void share_buffers();
  std::vector<char> packed_buffers() const;
  void unpack_buffers(const std::vector<char>& packed);

  // What makes it resumable. The memory stays where it is for this object's life.
  TrainingState training_state();

  Optimizer& optimizer() { return *optimizer_; }
  std::uint64_t updates() const { return updates_; }
  void count_update() { ++updates_; }
  // A run that is resumed goes on counting.
  void set_updates(std::uint64_t updates) { updates_ = updates; }

  // "parameters=<hex> optimizer=<hex> ema=<hex> buffers=<hex> rng=<hex>": equal digests mean equal bits.
  std::string digests();

 private:
  const Options& options_;
  Workload& workload_;
  const MPI_Comm communicator_;
  const std::unique_ptr<Optimizer> optimizer_;
  std::vector<float> ema_;
  std::uint64_t updates_ = 0;
};

}  // namespace holdfast::train
