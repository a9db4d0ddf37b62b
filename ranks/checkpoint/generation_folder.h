// What rank 0 does to the folder of generations: publish, remove, set aside.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "holdfast/checkpoint/checkpoint_store.h"
#include "holdfast/checkpoint/manifest.pb.h"
#include "retention.h"

namespace holdfast {

// Of one run, which holds the lock on its folder. stored() may be called by any thread, all else by one at a
// time.
class GenerationFolder {
 public:
  // `files` must outlive it.
  GenerationFolder(FileSystem& files, std::string path, const CheckpointOptions& options)
      : files_(files), path_(std::move(path)), options_(options) {}

  // Makes the folder, removes what a killed run left half-written or half-removed, and lists the rest.
  Status open();
  // Lists it again. INTERNAL when it cannot be read.
  Status refresh();

  // From the partial folder, in which all parts that `manifest` names are on disk. Then removes what
  // retention does not keep. Fills `outcome`; unless it is published the partial folder is discarded.
  void publish(const Manifest& manifest, CheckpointOutcome* outcome);
  // Removes the partial folder of one that is not published. A rank that was late may make it again: so once
  // more with the next publish(), and in any case when the folder is opened again.
  void discard(const GenerationId& id);

  // Moves a generation into set-aside/, where nothing is ever deleted. `*as`: its path there.
  Status set_aside(const GenerationId& id, std::string* as);

  // Oldest first.
  std::vector<StoredGeneration> stored() const;
  const std::string& path() const { return path_; }

 private:
  std::string path_of(const GenerationId& id) const { return generation_path(path_, id); }
  Status check_parts(const Manifest& manifest) const;
  Status write_and_publish(const Manifest& manifest, const GenerationId& id, CheckpointOutcome* outcome);
  void sweep();
  void retain(CheckpointOutcome* outcome);
  Status remove(const GenerationId& id);

  FileSystem& files_;
  const std::string path_;
  const CheckpointOptions options_;
  std::vector<GenerationId> discarded_;
  mutable std::mutex mutex_;
  std::vector<StoredGeneration> stored_;  // guarded by mutex_
};

}  // namespace holdfast
