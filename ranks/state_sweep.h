// One pass over what makes a run resumable, beside the training: is it finite, and is it what the other
// replicas have?
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "holdfast/coord/storage/background_writer.h"
#include "holdfast/scan.h"
#include "holdfast/training_state.h"

namespace holdfast {

// Parameters and optimizer state rest between an update and the next, while forward and backward run: that is
// when they are read, in place, on another thread. What forward changes is copied first. Used by one thread.
class StateSweep {
 public:
  enum class Scope { kReplicas, kEverything };

  // `state` and its memory must outlive this. With `prove_optimizer_state` the proof covers all replicated
  // tensors.
  StateSweep(const TrainingState& state, bool prove_optimizer_state);

  // Begins to read what the proof covers, or all of it. Nothing but forward may change the state until
  // finish().
  void begin(Scope scope);
  bool running() const { return running_; }

  struct Found {
    std::string tensor;
    Probe probe;
  };
  struct Result {
    std::uint64_t proof = 0;             // equal for equal replicas, and else different but for 2^-64
    std::vector<std::uint64_t> digests;  // of proven() each
    std::vector<Found> non_finite;       // that must be finite, and are not
  };
  // Waits for the end of the pass.
  Result finish();

  // Names of the tensors that the proof covers.
  std::vector<std::string> proven() const;

 private:
  struct Item {
    const StateTensor* tensor;
    bool proven;
    std::vector<std::byte> copy;  // of one that forward changes
  };
  void read(Scope scope);

  std::vector<Item> items_;
  bool running_ = false;
  Result result_;            // the thread's, until finish()
  BackgroundWriter thread_;  // last: it ends first
};

}  // namespace holdfast
