// One bundle, from what is known of an incident to a folder that is published.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "holdfast/collectives/status.h"
#include "holdfast/coord/evidence/evidence.pb.h"
#include "holdfast/coord/evidence/evidence_store.h"
#include "holdfast/coord/generation_id.h"
#include "holdfast/coord/storage/file_system.h"

namespace holdfast {

class BundleWriter {
 public:
  // Takes the parts with the data of their tensors. `incidents` is the parent of the bundle's folder.
  BundleWriter(FileSystem& files, const std::string& incidents, BundleManifest about,
               std::vector<EvidencePart> parts);

  // Once. INTERNAL when it cannot be written: then nothing is published, but after a failure of the very last
  // sync, when the bundle is there and only not known to be on disk. May throw std::bad_alloc with nothing
  // published; discard() then.
  Status write(const TensorAllowance& allowance);
  // Removes what was written and not published, as far as that goes.
  void discard();

  GenerationId id() const { return {manifest_.epoch(), manifest_.attempt()}; }
  // After write().
  bool compact() const { return manifest_.compact(); }
  const std::string& content_id() const { return content_id_; }
  std::uint64_t bytes() const { return bytes_; }             // of all files
  const std::string& left_out() const { return left_out_; }  // and why; "" for nothing

 private:
  struct Tensor {
    int part = 0;  // of manifest_
    EvidenceTensor entry;
    std::string data;
    std::string why;  // it is left out
  };

  std::uint64_t text_bytes() const;
  Status limit_to_disk(TensorAllowance* allowance) const;
  void leave_out_beyond(const TensorAllowance& allowance);
  void tell_of_tensors();
  void note(const std::string& what);
  Status write_tensors(int part);
  Status write_text(BundleFile* file, std::string_view name, const std::string& text);
  Status write_texts();

  FileSystem& files_;
  const std::string incidents_;
  BundleManifest manifest_;
  std::vector<Tensor> tensors_;  // by part; in one, larger elements first
  std::string name_;
  std::string partial_;
  std::string content_id_;
  std::string left_out_;
  std::uint64_t bytes_ = 0;
};

}  // namespace holdfast
