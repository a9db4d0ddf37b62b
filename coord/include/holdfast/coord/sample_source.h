// Which samples an attempt used, as the trainer tells it.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace holdfast {

// A sample of the training data.
struct Sample {
  std::int64_t id = 0;
  std::int64_t label = -1;  // its class, below the number of classes; -1 when it has none
};

// Where rank 0 learns which samples an attempt used: from a sampler that is a pure function of (rank,
// attempt), so that a clean attempt costs nothing and a skip no message. Called on rank 0 by its training
// thread, for each rank, in the decide() of an attempt that is skipped.
struct SampleSource {
  std::function<std::vector<Sample>(int rank, std::uint64_t attempt)> samples_of;
  std::vector<std::uint64_t>
      class_counts;  // samples of each class in the training data; empty without classes
};

}  // namespace holdfast
