// Reading a bundle back: on any machine, without MPI and without the run. Everything in it is hostile until
// checked.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "holdfast/collectives/status.h"
#include "holdfast/coord/generation_id.h"
#include "holdfast/coord/storage/file_system.h"

namespace holdfast {

class BundleManifest;
class EvidenceTensor;

std::string incidents_path(const std::string& run_dir);  // RUN_DIR/incidents

// What is published there, by epoch and attempt; nothing when there is no such folder. INTERNAL when it
// cannot be read.
Status list_bundles(FileSystem& files, const std::string& incidents, std::vector<GenerationId>* out);

inline constexpr char kEvidenceIdPrefix[] = "training-incident-evidence@sha256:";

// Used by one thread at a time; `files` must outlive it.
class Bundle {
 public:
  // Reads the manifest and checks it: version, content id, names of files without a path, sizes, headers; a
  // folder that is named after another incident is refused. INTERNAL, saying what is wrong, for whatever is
  // not whole.
  static Status open(FileSystem& files, const std::string& path, std::unique_ptr<Bundle>* out);
  ~Bundle();

  const std::string& path() const;
  const BundleManifest& manifest() const;
  const std::string& content_id() const;  // with its prefix

  // The bytes of a tensor of manifest().parts(), as its digest says they were. INTERNAL otherwise.
  Status read(const EvidenceTensor& tensor, std::string* bytes) const;

  // Every byte of every file: a line for each fault, names printable, at most 32; none when all is what was
  // written. A file that is not the bundle's is a fault, too, but for experiments.jsonl.
  std::vector<std::string> verify() const;

 private:
  class Impl;
  explicit Bundle(std::unique_ptr<Impl> impl);
  const std::unique_ptr<Impl> impl_;
};

}  // namespace holdfast
