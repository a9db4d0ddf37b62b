// What all ranks conclude from the reduced record: a pure function, so identical bits in give identical
// verdicts on every rank.
#pragma once

#include <cstdint>
#include <optional>

#include "holdfast/collectives/record.h"

namespace holdfast {

struct Verdict {
  // What was wrong, worst first. Anything but kClean means: do not apply the update.
  enum class Kind {
    kMissing,       // fewer, or more, participants than ranks
    kDisagree,      // ranks at different attempts, epochs, policies or protocol versions
    kUpdateFailed,  // the last applied update failed on a rank: replicas may differ
    kDiverged,      // replicas were compared, and differ
    kError,         // a rank caught an exception
    kNonFinite,     // a non-finite value was seen
    kRequested,     // nothing is wrong, but a rank asks for something
    kClean
  };

  Kind kind = Kind::kMissing;
  Record sum;
  std::optional<Stage> earliest_stage = {};  // the first stage with a non-finite value on any rank
  std::optional<int> only_bad_rank = {};     // set when exactly one rank is bad
  bool last_attempt_with_data = false;  // a rank has no batch for the next attempt: all stop after this one

  bool parts_done = false;  // every rank's part of the checkpoint in flight is on disk, or has failed

  bool clean() const { return kind == Kind::kClean; }

  // An overflow that a smaller loss scale may cure: the first non-finite values are gradients, local or
  // summed, and input, output and loss were finite on every rank.
  bool gradient_overflow() const {
    return kind == Kind::kNonFinite &&
           (earliest_stage == Stage::kBackward || earliest_stage == Stage::kReduction);
  }
};

// Fails closed: a sum that misses a participant, that disagrees, or with a lane set that this version does
// not know, never gives a clean verdict. `world_size` is the number of ranks in the collective, at least 1.
Verdict judge(const Record& sum, int world_size);

}  // namespace holdfast
