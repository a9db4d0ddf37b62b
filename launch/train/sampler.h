// Which samples a rank trains on, and the keys of its random numbers: pure functions of (seed, rank, attempt,
// micro-batch), so that neither a skip nor an exception can shift them.
#pragma once

#include <cstdint>
#include <vector>

#include "holdfast/collectives/status.h"

namespace holdfast::train {

// The seed of the random numbers (dropout, augmentation) that `rank` draws in one micro-batch. SplitMix64's
// finaliser over the four numbers one after the other.
std::uint64_t rng_key(std::uint64_t seed, int rank, std::uint64_t attempt, int micro);

// USAGE unless a Sampler can be made: every number positive, and at least one sample for each rank.
Status check_sampler(std::int64_t dataset_size, int world_size, std::int64_t batch, int micro_batches);

// Pass e over the data is a permutation of the data set keyed by (seed, e). Rank r owns the r-th of
// world_size equal shards of it, floor(dataset_size / world_size) samples, so ranks never share a sample
// within a pass; the remainder of a pass is left out. Micro-batch m of attempt a starts at sample (a *
// micro_batches + m) * batch of the rank's shards of all passes, strung together: a batch that reaches the
// end of a pass goes on in the next.
//
// One thread. Keeps the permutation of one pass: in order, each is made once.
class Sampler {
 public:
  // What check_sampler() accepts, and 0 <= rank < world_size.
  Sampler(std::uint64_t seed, std::int64_t dataset_size, int rank, int world_size, std::int64_t batch,
          int micro_batches);

  // The `batch` sample ids, 0 <= id < dataset_size, of one micro-batch, 0 <= micro < micro_batches.
  void batch(std::uint64_t attempt, int micro, std::vector<std::int64_t>* sample_ids);

 private:
  void permute(std::uint64_t pass);

  const std::uint64_t seed_;
  const std::int64_t dataset_size_;
  const int rank_;
  const std::uint64_t shard_;  // samples of this rank in a pass
  const std::int64_t batch_;
  const int micro_batches_;

  std::vector<std::int64_t> permutation_;  // of pass_; empty before the first batch
  std::uint64_t pass_ = 0;
};

}  // namespace holdfast::train
