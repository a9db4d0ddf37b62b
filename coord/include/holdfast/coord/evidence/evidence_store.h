// RUN_DIR/incidents: rank 0 keeps there what makes an incident happen again.
//
//   e0001-a0000001842/          one incident: epoch 1, attempt 1842
//     manifest.pb               what there is, see coord/evidence/evidence.proto
//     manifest.json             the same, strict JSON, for people and other programs
//     report.json, report.md    the incident report, contract training-incident-v1
//     rank-00007.safetensors    the tensors that rank 7 contributed
//     experiments.jsonl         what was tried on it afterwards; not under the content id
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "holdfast/collectives/status.h"
#include "holdfast/coord/generation_id.h"
#include "holdfast/coord/storage/file_system.h"

namespace holdfast {

class BundleManifest;
class EvidencePart;

struct EvidenceOptions {
  std::uint64_t full_incidents = 3;                             // with tensors; later ones are compact
  std::uint64_t bundle_quota_bytes = std::uint64_t{256} << 20;  // of the tensors of one bundle
  // Of all files of all bundles of the run. Once it is used up, bundles are compact ones: so it is exceeded
  // by no more than the texts of `most_bundles`.
  std::uint64_t run_quota_bytes = std::uint64_t{2} << 30;
  std::uint64_t most_bundles = 1000;  // compact ones included; later ones are refused
};

// How many bytes of tensors a bundle may hold, and what hinders it from holding more. None at all: it is a
// compact one.
struct TensorAllowance {
  std::uint64_t bytes = 0;
  std::string why;
};

struct BundleOutcome {
  GenerationId id;  // epoch and attempt of the incident; its name is the folder's
  bool published = false;
  bool compact = false;
  std::string content_id;  // "training-incident-evidence@sha256:<hex>"
  std::string reason;      // why not; or what was left out
  std::uint64_t bytes = 0;
  double seconds = 0;
};

// On rank 0. Used by one thread; writes on another.
class EvidenceStore {
 public:
  // Makes `incidents`, counts what is there already, and removes what a killed run left half-written.
  // INTERNAL when that fails: the run goes on without evidence.
  static Status create(FileSystem& files, const std::string& incidents, const EvidenceOptions& options,
                       std::unique_ptr<EvidenceStore>* out);
  ~EvidenceStore();  // waits for what is being written

  // For the next bundle: so many bytes of tensors are worth sending.
  TensorAllowance next() const;

  // Takes the parts, with their tensors' data, and writes the bundle in the background. `about` is what is
  // known of the incident, without `parts` and `files`; with `compact` set, its tensors are left out. Never
  // waits: a bundle for which there is no room among those that are not yet written is refused, in an
  // outcome. Two hold their tensors in memory at most; more wait without any.
  //
  // Tensors beyond the quotas or the room on disk are left out, those of STATE first, then SEEN, then BATCH,
  // the largest first: they are in `omitted` of their part. So are those that are no tensors of the
  // safetensors format. The others are in the manifest by their part, larger elements first. Strings that are
  // no UTF-8 are made so.
  void submit(BundleManifest about, std::vector<EvidencePart> parts);

  std::vector<BundleOutcome> take_outcomes();
  // Whether all was written in time.
  bool wait_for(std::chrono::milliseconds most);

 private:
  class Impl;
  explicit EvidenceStore(std::unique_ptr<Impl> impl);
  const std::unique_ptr<Impl> impl_;
};

}  // namespace holdfast
