// A bundle as the record of one rank's attempt, and the state before it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "holdfast/coord/evidence/bundle.h"
#include "holdfast/replay.h"

namespace holdfast {

class BundleManifest;
class EvidencePart;

class ReplayBundle {
 public:
  // Both must outlive it. `run_dir` "": where the bundle was written.
  ReplayBundle(FileSystem& files, const std::string& path, const std::string& run_dir)
      : files_(files), path_(path), run_dir_(run_dir) {}

  // Reads and checks all of the bundle but the state. "", or what is missing or wrong. But for a batch
  // that is not there: see missing_batch().
  std::string open();
  std::string missing_batch() const;
  // For who can make the batch again.
  RecordedAttempt* mutable_attempt() { return &attempt_; }

  const std::string& path() const { return path_; }
  const std::string& content_id() const { return bundle_->content_id(); }
  const RecordedAttempt& attempt() const { return attempt_; }
  const Boundary& boundary() const { return boundary_; }
  const EvidencePart& origin() const { return *origin_; }
  const std::map<std::string, std::string>& environment() const { return environment_; }

  // The state before the attempt: from the bundle when it holds all of `needed` and is of the origin's
  // replica group, else from the checkpoint that it names. "", or what is missing.
  std::string read_state(const std::vector<std::string>& needed);
  const std::map<std::string, RecordedTensor>& state() const { return state_; }
  // Whether it has what is each rank's own: a bundle's is rank 0's.
  bool has_own_state() const { return has_own_state_; }
  const std::string& state_source() const { return state_source_; }  // "bundle" or a checkpoint's name

 private:
  std::string find_origin();
  std::string find_boundary();
  std::string read_tensors();
  const EvidencePart* find_part(int rank) const;  // null when there is none
  std::string why_not_the_bundle() const;
  std::string read_bundled_state();
  std::string read_checkpoint();
  std::string why_not_the_attempt() const;

  FileSystem& files_;
  const std::string& path_;
  const std::string& run_dir_;
  std::unique_ptr<Bundle> bundle_;
  const EvidencePart* origin_ = nullptr;
  RecordedAttempt attempt_;
  Boundary boundary_;
  std::map<std::string, std::string> environment_;
  std::map<std::string, RecordedTensor> state_;
  std::set<std::string> of_rank_0_;  // what the bundle has of it, and not of the origin
  bool has_own_state_ = false;
  std::string state_source_;
};

// Why the bundle's state of this name cannot serve.
std::string not_of_rank(const std::string& name, int rank);

// ---- comparison, see replay_watcher.cc

bool same_place(const Boundary& found, const Boundary& recorded);  // but for classes
bool within_classes(const BadCounts& found, const BadCounts& recorded);
bool same_boundary(const Boundary& found, const Boundary& recorded);
bool is_made_in_part(Stage stage);

struct BitComparison {
  std::uint64_t compared = 0;
  std::string first_difference;  // printable; "" for none
};
BitComparison compare_measurements(const EvidencePart& found, const EvidencePart& recorded);

}  // namespace holdfast
