// One replay: the trainer given what was recorded, and what came of it.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "replay_bundle.h"

namespace holdfast {

struct ReplayOutcome {
  std::string missing;  // why it could not be made; the rest is empty then
  std::optional<Boundary> found;
  std::string last_clean, first_dirty;
  BitComparison bits;
  std::vector<std::pair<std::string, std::string>> notes;
  bool weights_untouched = false;
  std::string batch_sha256;  // of what it was made of
};

// The samples of the batch of a micro-batch, over all of its tensors; 0 when they have no first extent in
// common.
std::int64_t count_samples(const RecordedAttempt& attempt, int micro_batch);

class AttemptReplay {
 public:
  // All must outlive it.
  AttemptReplay(ReplayBundle& recorded, const ReplayTrainer& trainer)
      : recorded_(recorded), trainer_(trainer) {}

  // `settings` without those of samples. Never throws but for want of memory.
  ReplayOutcome run(const std::vector<std::string>& settings, const std::vector<RecordedSample>& blanked);

 private:
  Status prepare(const RecordedAttempt& recorded);
  Status load_state();
  Status fill(const TrainingState& state);
  void make(const RecordedAttempt& recorded, ReplayWatcher& watcher);
  std::string weights() const;

  ReplayBundle& recorded_;
  const ReplayTrainer& trainer_;
  std::optional<std::vector<std::string>> prepared_;  // with which settings
};

}  // namespace holdfast
