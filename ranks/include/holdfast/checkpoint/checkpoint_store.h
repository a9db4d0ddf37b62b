// Checkpoints of a run on all its ranks: written in the background, published when every rank's part is on disk and
// finite, kept in several generations, restored from the newest that every rank finds clean.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "holdfast/checkpoint/generation.h"
#include "holdfast/collectives/collective.h"
#include "holdfast/coord/storage/file_system.h"
#include "holdfast/replica_groups.h"
#include "holdfast/training_state.h"

namespace holdfast {

struct CheckpointOptions {
  std::uint64_t interval_attempts = 0;  // between two generations; 0: no checkpoints
  std::uint64_t keep = 3;               // newest clean generations; at least 1
  std::uint64_t keep_every = 0;         // and every M-th that was published; 0: none of these
  std::uint64_t quota_bytes = 0;        // of all generations together; 0: what the disk holds
  // Rank 0's: asked on the writer's thread, right before a generation is published; when it is not ok, nothing is
  // published and nothing removed. For a run whose folder may be taken over by another.
  std::function<Status()> before_publication = nullptr;
};

// Where a run is between two attempts.
struct RunPosition {
  std::uint64_t epoch = 0;
  std::uint64_t attempt = 0;  // the next one
  std::uint64_t update = 0;   // applied so far
  std::uint64_t skips = 0;
};

// What became of a generation. On rank 0.
struct CheckpointOutcome {
  GenerationId id;
  bool published = false;
  bool non_finite = false;  // refused for that; `reason` names tensor, index and rank
  std::string reason;       // when it was not published; what went wrong beside, such as with removing old ones
  std::string manifest_sha256;  // of a published one, see generation.h
  std::uint64_t bytes = 0;
  double seconds = 0;                 // from save() to publication
  std::vector<std::string> removed;   // names of older generations that are not kept any longer
};

struct RestoredGeneration {
  RunPosition position;  // as it was saved; the same on every rank
  std::string manifest_sha256;  // see generation.h
  Bytes memory;          // what rank 0 passed to save(); on rank 0 only
  std::uint64_t ranks = 0;            // of the run that wrote it
  std::vector<std::string> refused;   // newer ones, and why, newest first; on rank 0 only
};

// One for each rank, used by the thread that may call MPI. The same calls in the same order on every rank.
class CheckpointStore {
 public:
  // Collective. `checkpoints` is the folder, "" on ranks that are not 0: rank 0's is used by all, so it must be on a
  // file system that all hosts share. Rank 0 makes it, and removes what a killed run left half-written. `state` is told
  // by all ranks; it must outlive the store. USAGE, on every rank alike, for bad options, a folder that cannot be had or
  // seen, or a state that check() refuses or of which ranks of a replica group hold different replicated parts. Without
  // `groups` all ranks are of one.
  static Status create(Collective& collective, FileSystem& files, const std::string& checkpoints,
                       const CheckpointOptions& options, const TrainingState& state,
                       std::unique_ptr<CheckpointStore>* out);
  static Status create(Collective& collective, FileSystem& files, const std::string& checkpoints,
                       const CheckpointOptions& options, const TrainingState& state, const ReplicaGroups& groups,
                       std::unique_ptr<CheckpointStore>* out);
  ~CheckpointStore();  // waits for the writer

  // Local; each rank at the same place, between two attempts and not while in_flight(). Copies what this rank has to
  // write (the first of a replica group: what it shares, and its own; others: their own) and begins to write it in the background, where
  // every tensor is scanned and digested. `memory` is kept in the manifest; rank 0's counts.
  void save(const RunPosition& position, const Bytes& memory);

  // A generation was begun and neither completed nor abandoned. The same on every rank.
  bool in_flight() const;
  GenerationId flight() const;  // which
  // This rank's part of it is on disk, or has failed. Local.
  bool part_done() const;

  // Collective, while in_flight(): waits for this rank's part, tells rank 0, which publishes the generation in the
  // background unless a part failed. The Status is of the collective only.
  Status complete();
  // Local, each rank at the same place: the generation in flight is not to be published (replicas turned out to
  // differ). Its partial folder is removed by rank 0. `why` goes into the outcome.
  void abandon(const std::string& why);

  // On rank 0: what has become of generations since the last call, oldest first. Empty on other ranks.
  std::vector<CheckpointOutcome> take_outcomes();

  // Local: waits until nothing is written any more, on rank 0 until what complete() started is published.
  void wait();
  // Whether that was so in time.
  bool wait_for(std::chrono::milliseconds most);

  // Collective, between two attempts: fills the memory of `state` and calls its load()s, from the newest generation that
  // every rank finds whole and finite and rank 0 does not rule out. Older ones are tried in turn; what is damaged or not
  // finite is set aside. Abandons what is in flight. `at_most`, when given (rank 0's counts), rules out what is newer.
  // NO_CLEAN_GENERATION when there is none (with every reason), USAGE when a generation is sound but of another model,
  // of other replica groups or of a number of ranks that its per-rank state does not suit: nothing older is tried then. After a failure the
  // state is undefined.
  Status restore(RestoredGeneration* out, const std::optional<GenerationId>& at_most = std::nullopt);

  // On rank 0, after restore() or create(): moves generations newer than `newest` into set-aside/, so that none is ever
  // restored that the run has left behind.
  Status set_aside_newer(const GenerationId& newest);

  // The generations on disk, as of the last publication, restore or create(). On rank 0, oldest first.
  std::vector<GenerationId> generations() const;

 private:
  class Impl;
  explicit CheckpointStore(std::unique_ptr<Impl> impl);
  const std::unique_ptr<Impl> impl_;
};

}  // namespace holdfast
