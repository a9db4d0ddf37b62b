// Reading a bundle back: on any machine, without MPI and without the run. Everything in it is hostile until checked.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "holdfast/collectives/status.h"
#include "holdfast/coord/storage/file_system.h"

namespace holdfast {

class BundleManifest;
class EvidenceTensor;

inline constexpr char kEvidenceIdPrefix[] = "training-incident-evidence@sha256:";

class Bundle {
 public:
  // Reads the manifest and checks it: version, content id, names of files without a path, sizes, headers. INTERNAL,
  // saying what is wrong, for whatever is not whole.
  static Status open(FileSystem& files, const std::string& path, std::unique_ptr<Bundle>* out);
  ~Bundle();

  const std::string& path() const;
  const BundleManifest& manifest() const;
  const std::string& content_id() const;  // with its prefix

  // The bytes of a tensor of manifest().parts(), as its digest says they were. INTERNAL otherwise.
  Status read(const EvidenceTensor& tensor, std::string* bytes) const;

  // Every byte of every file: "" or one line for each fault, names printable.
  std::vector<std::string> verify() const;

 private:
  class Impl;
  explicit Bundle(std::unique_ptr<Impl> impl);
  const std::unique_ptr<Impl> impl_;
};

}  // namespace holdfast
