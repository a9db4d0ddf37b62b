#include "holdfast/coord/evidence/bundle.h"

#define XXH_STATIC_LINKING_ONLY  // a state on the stack
#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <map>
#include <new>
#include <set>
#include <utility>

#include "bundle_file.h"
#include "bundle_limits.h"
#include "canonical.h"
#include "holdfast/coord/evidence/evidence.pb.h"
#include "holdfast/coord/generation_id.h"
#include "holdfast/coord/printable.h"
#include "holdfast/coord/storage/safetensors.h"
#include "holdfast/coord/storage/sha256.h"

namespace holdfast {
namespace {

constexpr std::size_t kMostFaults = 32;
constexpr std::uint64_t kBlockBytes = 1 << 20;

TensorDigest told_digest(const EvidenceTensor& tensor) { return {tensor.digest_high(), tensor.digest_low()}; }

// The tensor's place in a file is told by the manifest, which was checked.
bool same_place(const EvidenceTensor& a, const EvidenceTensor& b) {
  return a.file() == b.file() && a.begin() == b.begin() && a.bytes() == b.bytes() &&
         told_digest(a) == told_digest(b);
}

Status damaged(const std::string& path, const std::string& how) {
  return Status::internal(printable(path) + " is damaged: " + printable(how));
}

// Opens the file of a part that has tensors. It must be what the manifest says, but for the tensors' bytes.
Status open_tensors(FileSystem& files, const std::string& path, const EvidencePart& part,
                    const std::string& header_sha256, std::unique_ptr<ReadableFile>* out,
                    std::uint64_t* data_begins) {
  std::unique_ptr<ReadableFile> file;
  if (Status s = files.open_file(path, &file); !s.ok()) return s;
  SafetensorsHeader header;
  std::string raw;
  if (Status s = read_safetensors_header(*file, &header, &raw); !s.ok()) return damaged(path, s.message());
  std::vector<SafetensorsEntry> told = header_entries(part);
  bool as_told = hex(sha256(raw)) == header_sha256 && header.tensors.size() == told.size();
  for (std::size_t i = 0; as_told && i < told.size(); ++i) {
    const SafetensorsEntry& there = header.tensors[i];
    const EvidenceTensor& tensor = part.tensors(static_cast<int>(i));
    as_told = there.name == told[i].name && there.dtype == told[i].dtype && there.shape == told[i].shape &&
              there.begin == tensor.begin() && there.end - there.begin == tensor.bytes();
  }
  if (!as_told) return damaged(path, "its header is not what the manifest says");
  *data_begins = header.bytes;
  *out = std::move(file);
  return Status();
}

Status check_digest(const ReadableFile& file, std::uint64_t begin, const EvidenceTensor& tensor,
                    std::vector<std::byte>* block) {
  XXH3_state_t hash;
  XXH3_128bits_reset(&hash);
  for (std::uint64_t at = 0; at < tensor.bytes(); at += kBlockBytes) {
    const std::span part(block->data(), std::min(kBlockBytes, tensor.bytes() - at));
    if (Status s = file.read(begin + at, part); !s.ok()) return s;
    XXH3_128bits_update(&hash, part.data(), part.size());
  }
  const XXH128_hash_t value = XXH3_128bits_digest(&hash);
  if (TensorDigest{value.high64, value.low64} == told_digest(tensor)) return Status();
  return Status::internal("\"" + printable(tensor.name()) + "\" is not what was written");
}

}  // namespace

class Bundle::Impl {
 public:
  Impl(FileSystem& files, const std::string& path) : files_(files), path_(path) {}

  Status open();
  Status read(const EvidenceTensor& tensor, std::string* bytes) const;
  std::vector<std::string> verify() const;

  const std::string& path() const { return path_; }
  const BundleManifest& manifest() const { return manifest_; }
  const std::string& content_id() const { return content_id_; }

 private:
  std::string path_of(std::string_view name) const { return path_ + "/" + std::string(name); }
  Status open_part(const EvidencePart& part, std::unique_ptr<ReadableFile>* file,
                   std::uint64_t* data_begins) const;
  Status check_name() const;
  std::vector<Status> check_names() const;
  Status check_text(const std::string& name, std::uint64_t most, const std::string& sha256_hex) const;
  void check_tensors(const EvidencePart& part, std::vector<Status>* faults) const;

  FileSystem& files_;
  const std::string path_;
  std::string encoded_sha256_;
  BundleFile file_;
  BundleManifest manifest_;
  std::string content_id_;
  std::map<std::string, std::string> header_sha256_;  // of files with tensors
};

Status Bundle::Impl::open() {
  if (files_.kind(path_) != FileKind::kFolder) return Status::internal(printable(path_) + " is no folder");
  const std::string path = path_of(kBundleManifestName);
  std::string bytes;
  if (Status s = read_file(files_, path, kLargestBundleManifest, &bytes); !s.ok()) return s;
  if (Status s = decode_bundle(bytes, &file_, &manifest_); !s.ok()) {
    return Status::internal(printable(path) + ": " + s.message());
  }
  encoded_sha256_ = hex(sha256(bytes));
  content_id_ = evidence_content_id(file_.content_id());
  for (const Named& file : manifest_.files()) header_sha256_[file.name()] = file.value();
  if (Status s = check_name(); !s.ok()) return s;
  for (const EvidencePart& part : manifest_.parts()) {
    std::unique_ptr<ReadableFile> file;
    std::uint64_t data_begins = 0;
    if (part.tensors_size() == 0) continue;
    if (Status s = open_part(part, &file, &data_begins); !s.ok()) return s;
  }
  return Status();
}

// One that was moved may have any name, but not that of another incident.
Status Bundle::Impl::check_name() const {
  std::string_view path = path_;
  while (path.ends_with('/')) path.remove_suffix(1);
  GenerationId named;
  const GenerationId told = {manifest_.epoch(), manifest_.attempt()};
  const bool other = parse_generation_name(path.substr(path.rfind('/') + 1), &named) && named != told;
  return other ? Status::internal(printable(path_) + " is of another incident, " + told.name()) : Status();
}

Status Bundle::Impl::open_part(const EvidencePart& part, std::unique_ptr<ReadableFile>* file,
                               std::uint64_t* data_begins) const {
  const std::string name = rank_tensors_name(part.rank());
  return open_tensors(files_, path_of(name), part, header_sha256_.at(name), file, data_begins);
}

Status Bundle::Impl::read(const EvidenceTensor& tensor, std::string* bytes) const {
  bytes->clear();
  for (const EvidencePart& part : manifest_.parts()) {
    if (part.tensors_size() == 0 || part.tensors(0).file() != tensor.file()) continue;
    const auto found =
        std::ranges::find_if(part.tensors(), [&](const auto& one) { return same_place(one, tensor); });
    if (found == part.tensors().end()) break;
    std::unique_ptr<ReadableFile> file;
    std::uint64_t data_begins = 0;
    if (Status s = open_part(part, &file, &data_begins); !s.ok()) return s;
    bytes->resize(tensor.bytes());  // no more than the file has
    Status s = file->read(data_begins + tensor.begin(), std::as_writable_bytes(std::span(*bytes)));
    if (s.ok() && tensor_digest(*bytes) != told_digest(tensor)) {
      s = damaged(path_of(tensor.file()), "\"" + tensor.name() + "\" is not what was written");
    }
    if (!s.ok()) bytes->clear();
    return s;
  }
  return Status::internal(printable(path_) + " has no such tensor: \"" + printable(tensor.name()) + "\"");
}

std::vector<Status> Bundle::Impl::check_names() const {
  std::set<std::string, std::less<>> expected = {std::string(kBundleManifestName)};
  for (const Named& file : file_.files()) expected.insert(file.name());
  for (const Named& file : manifest_.files()) expected.insert(file.name());
  std::vector<std::string> names;
  if (Status s = files_.list(path_, &names); !s.ok()) return {s};
  std::vector<Status> faults;
  for (const std::string& name : names) {
    const bool log = name == kExperimentsName && files_.kind(path_of(name)) == FileKind::kFile;
    if (!log && !expected.contains(name)) {
      faults.push_back(Status::internal(printable(path_of(name)) + " is not in the manifest"));
    }
  }
  return faults;
}

Status Bundle::Impl::check_text(const std::string& name, std::uint64_t most,
                                const std::string& sha256_hex) const {
  std::string bytes;
  const std::string path = path_of(name);
  if (Status s = read_file(files_, path, most, &bytes); !s.ok()) return s;
  return hex(sha256(bytes)) == sha256_hex ? Status() : damaged(path, "it is not what was written");
}

void Bundle::Impl::check_tensors(const EvidencePart& part, std::vector<Status>* faults) const {
  std::unique_ptr<ReadableFile> file;
  std::uint64_t data_begins = 0;
  if (Status s = open_part(part, &file, &data_begins); !s.ok()) {
    faults->push_back(s);
    return;
  }
  std::uint64_t largest = 0;
  for (const EvidenceTensor& tensor : part.tensors()) largest = std::max(largest, tensor.bytes());
  std::vector<std::byte> block(std::min(kBlockBytes, largest));
  for (const EvidenceTensor& tensor : part.tensors()) {
    Status s = check_digest(*file, data_begins + tensor.begin(), tensor, &block);
    if (!s.ok()) faults->push_back(damaged(path_of(tensor.file()), s.message()));
  }
}

std::vector<std::string> Bundle::Impl::verify() const {
  std::vector<Status> faults = check_names();
  faults.push_back(check_text(std::string(kBundleManifestName), kLargestBundleManifest, encoded_sha256_));
  for (const Named& file : file_.files()) {
    faults.push_back(check_text(file.name(), kLargestBundleText, file.value()));
  }
  for (const EvidencePart& part : manifest_.parts()) {
    if (part.tensors_size() > 0) check_tensors(part, &faults);
  }
  std::vector<std::string> lines;
  for (const Status& fault : faults) {
    if (fault.ok()) continue;
    if (lines.size() == kMostFaults) {
      lines.back() = "and more";
      break;
    }
    lines.push_back(printable(fault.message()));
  }
  return lines;
}

std::string incidents_path(const std::string& run_dir) { return run_dir + "/incidents"; }

Status list_bundles(FileSystem& files, const std::string& incidents, std::vector<GenerationId>* out) {
  out->clear();
  if (!files.exists(incidents)) return Status();
  std::vector<std::string> names;
  if (Status s = files.list(incidents, &names); !s.ok()) return s;
  for (const std::string& name : names) {
    GenerationId id;
    if (parse_generation_name(name, &id)) out->push_back(id);
  }
  std::ranges::sort(*out);
  return Status();
}

// ---- the public face

Bundle::Bundle(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Bundle::~Bundle() = default;

Status Bundle::open(FileSystem& files, const std::string& path, std::unique_ptr<Bundle>* out) try {
  out->reset();
  auto impl = std::make_unique<Impl>(files, path);
  if (Status s = impl->open(); !s.ok()) return s;
  out->reset(new Bundle(std::move(impl)));
  return Status();
} catch (const std::bad_alloc&) {
  return Status::internal("out of memory");
}

const std::string& Bundle::path() const { return impl_->path(); }
const BundleManifest& Bundle::manifest() const { return impl_->manifest(); }
const std::string& Bundle::content_id() const { return impl_->content_id(); }

Status Bundle::read(const EvidenceTensor& tensor, std::string* bytes) const try {
  return impl_->read(tensor, bytes);
} catch (const std::bad_alloc&) {
  return Status::internal("out of memory");
}

std::vector<std::string> Bundle::verify() const try {
  return impl_->verify();
} catch (const std::bad_alloc&) {
  return {"out of memory"};
}

}  // namespace holdfast
