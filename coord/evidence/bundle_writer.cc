#include "bundle_writer.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

#include "bundle_file.h"
#include "bundle_limits.h"
#include "canonical.h"
#include "holdfast/coord/evidence/incident_report.h"
#include "holdfast/coord/evidence/manifest_json.h"
#include "holdfast/coord/printable.h"
#include "holdfast/coord/storage/publication.h"
#include "holdfast/coord/storage/safetensors.h"
#include "holdfast/coord/storage/sha256.h"

namespace holdfast {
namespace {

constexpr std::uint64_t kSpareBytes = 64 << 10;  // what folders and headers may take on disk
constexpr std::size_t kBlockBytes = 1 << 20;

// Why this tensor cannot be kept; "" when it can.
std::string fault_of(const EvidenceTensor& entry, std::uint64_t data_bytes) {
  if (!entry.has_name() || !entry.has_role()) return "it has no name or no role";
  std::uint64_t bytes = safetensors_dtype_size(entry.dtype());
  if (bytes == 0) return "its dtype is none of safetensors";
  for (const std::uint64_t extent : entry.shape()) {
    if (__builtin_mul_overflow(bytes, extent, &bytes)) return "its size overflows";
  }
  return bytes == data_bytes ? "" : "its bytes are not as many as its dtype and shape say";
}

// The batch makes the attempt again, and is kept longest.
int rank_of(EvidenceTensor::Role role) {
  return role == EvidenceTensor::STATE ? 0 : role == EvidenceTensor::SEEN ? 1 : 2;
}

Status append_in_blocks(WritableFile* file, std::string_view bytes) {
  for (; !bytes.empty(); bytes.remove_prefix(std::min(kBlockBytes, bytes.size()))) {
    if (Status s = file->append(bytes.substr(0, kBlockBytes)); !s.ok()) return s;
  }
  return Status();
}

}  // namespace

BundleWriter::BundleWriter(FileSystem& files, const std::string& incidents, BundleManifest about,
                           std::vector<EvidencePart> parts)
    : files_(files), incidents_(incidents), manifest_(std::move(about)) {
  manifest_.clear_parts();
  manifest_.clear_files();
  std::ranges::stable_sort(parts, {}, &EvidencePart::rank);
  for (EvidencePart& part : parts) {
    for (EvidenceTensor& entry : *part.mutable_tensors()) {
      Tensor& tensor = tensors_.emplace_back();
      tensor.part = manifest_.parts_size();
      tensor.data.swap(*entry.mutable_data());
      entry.clear_data();
      tensor.entry.Swap(&entry);
    }
    part.clear_tensors();
    manifest_.add_parts()->Swap(&part);
  }
  make_strings_utf8(&manifest_);
  for (Tensor& tensor : tensors_) {
    make_strings_utf8(&tensor.entry);
    tensor.why = fault_of(tensor.entry, tensor.data.size());
  }
  // Each is then aligned for readers that map the file.
  std::ranges::stable_sort(tensors_, [](const Tensor& a, const Tensor& b) {
    const auto key = [](const Tensor& tensor) {
      return std::pair(tensor.part, ~safetensors_dtype_size(tensor.entry.dtype()));
    };
    return key(a) < key(b);
  });
  name_ = id().name();
  partial_ = partial_path(incidents_, name_);
}

// What is written beside tensors takes about so much.
std::uint64_t BundleWriter::text_bytes() const {
  std::uint64_t bytes = manifest_.ByteSizeLong();
  for (const Tensor& tensor : tensors_) bytes += tensor.entry.ByteSizeLong();
  return kSpareBytes + 4 * bytes;
}

// A disk that has no room is not filled first.
Status BundleWriter::limit_to_disk(TensorAllowance* allowance) const {
  std::uint64_t free = 0;
  if (!files_.free_bytes(incidents_, &free).ok()) return Status();
  const std::uint64_t texts = text_bytes();
  if (free < texts) {
    return Status::internal(fmt::format("no space in {}: about {} bytes are needed and {} are free",
                                        printable(incidents_), texts, free));
  }
  if (free - texts < allowance->bytes) *allowance = {free - texts, "the disk has no room for it"};
  return Status();
}

void BundleWriter::leave_out_beyond(const TensorAllowance& allowance) {
  std::uint64_t bytes = 0;
  std::vector<Tensor*> order;
  for (Tensor& tensor : tensors_) {
    if (!tensor.why.empty()) continue;
    bytes += tensor.data.size();
    order.push_back(&tensor);
  }
  std::ranges::stable_sort(order, {}, [](const Tensor* tensor) {
    return std::pair(rank_of(tensor->entry.role()), ~tensor->data.size());
  });
  // No byte is allowed: then not even what has none, so that the bundle is a compact one.
  for (auto next = order.begin(); next != order.end() && (bytes > allowance.bytes || allowance.bytes == 0);
       ++next) {
    bytes -= (*next)->data.size();
    (*next)->why = allowance.why;
  }
}

// Those that are kept get into the manifest, the others into what it omits.
void BundleWriter::tell_of_tensors() {
  std::uint64_t bytes = 0;
  std::uint64_t count = 0;
  std::string why;
  // What the ranks did not even send, unless it was all of it and is told below.
  for (const EvidencePart& part : manifest_.parts()) {
    if (manifest_.omitted_size() > 0) break;
    for (const Omitted& omitted : part.omitted()) {
      if (count++ == 0) why = printable(omitted.why());
      bytes += omitted.bytes();
    }
  }
  for (Tensor& tensor : tensors_) {
    EvidencePart* part = manifest_.mutable_parts(tensor.part);
    if (tensor.why.empty()) {
      const TensorDigest digest = tensor_digest(tensor.data);
      tensor.entry.set_file(rank_tensors_name(part->rank()));
      tensor.entry.set_bytes(tensor.data.size());
      tensor.entry.set_digest_high(digest.high);
      tensor.entry.set_digest_low(digest.low);
      *part->add_tensors() = tensor.entry;
      continue;
    }
    Omitted* omitted = part->add_omitted();
    omitted->set_what(tensor.entry.name());
    omitted->set_bytes(tensor.data.size());
    omitted->set_why(tensor.why);
    if (count++ == 0) why = tensor.why;
    bytes += tensor.data.size();
  }
  std::erase_if(tensors_, [](const Tensor& tensor) { return !tensor.why.empty(); });
  for (const Omitted& omitted : manifest_.omitted())
    note(printable(omitted.what()) + " left out: " + printable(omitted.why()));
  if (count > 0) note(fmt::format("{} tensors of {} bytes left out: {}", count, bytes, why));
  manifest_.set_compact(tensors_.empty());
}

void BundleWriter::note(const std::string& what) { left_out_ += (left_out_.empty() ? "" : "; ") + what; }

Status BundleWriter::write_tensors(int part_index) {
  EvidencePart* part = manifest_.mutable_parts(part_index);
  if (part->tensors_size() == 0) return Status();
  std::vector<SafetensorsEntry> entries = header_entries(*part);
  std::string header;
  if (Status s = write_safetensors_header(&entries, {{"format", "pt"}}, &header); !s.ok()) return s;
  for (int i = 0; i < part->tensors_size(); ++i) {
    part->mutable_tensors(i)->set_begin(entries[static_cast<std::size_t>(i)].begin);
  }
  Named* told = manifest_.add_files();
  told->set_name(rank_tensors_name(part->rank()));
  told->set_value(hex(sha256(header)));
  bytes_ += header.size() + entries.back().end;

  std::unique_ptr<WritableFile> file;
  if (Status s = files_.create_file(partial_ + "/" + told->name(), &file); !s.ok()) return s;
  if (Status s = file->append(header); !s.ok()) return s;
  for (Tensor& tensor : std::ranges::equal_range(tensors_, part_index, {}, &Tensor::part)) {
    if (Status s = append_in_blocks(file.get(), tensor.data); !s.ok()) return s;
    std::string().swap(tensor.data);
  }
  if (Status s = file->sync(); !s.ok()) return s;
  return file->close();
}

Status BundleWriter::write_text(BundleFile* file, std::string_view name, const std::string& text) {
  Named* told = file->add_files();
  told->set_name(std::string(name));
  told->set_value(hex(sha256(text)));
  bytes_ += text.size();
  return write_synced(files_, partial_ + "/" + std::string(name), text);
}

Status BundleWriter::write_texts() {
  using Json = nlohmann::ordered_json;
  const auto dump = [](const Json& json) {
    return json.dump(1, ' ', true, Json::error_handler_t::replace) + "\n";
  };
  BundleFile file = bundle_file(manifest_);
  content_id_ = evidence_content_id(file.content_id());
  // A bundle that could not be read back must not be taken for evidence.
  BundleFile as_read;
  BundleManifest manifest_as_read;
  if (Status s = decode_bundle(encode_bundle(file), &as_read, &manifest_as_read); !s.ok()) return s;
  if (Status s = write_text(&file, kManifestJsonName, dump(manifest_json(manifest_, content_id_))); !s.ok())
    return s;
  Json report;
  // Some incidents are outside of the contract and have none.
  if (Status made = make_incident_report(manifest_, content_id_, &report); !made.ok()) {
    note(printable(made.message()));
  } else if (Status s = write_text(&file, kReportJsonName, dump(report)); !s.ok()) {
    return s;
  }
  const std::string markdown = incident_report_markdown(manifest_, content_id_, incidents_ + "/" + name_);
  if (Status s = write_text(&file, kReportMarkdownName, markdown); !s.ok()) return s;
  const std::string encoded = encode_bundle(file);
  bytes_ += encoded.size();
  return write_synced(files_, partial_ + "/" + std::string(kBundleManifestName), encoded);
}

Status BundleWriter::write(const TensorAllowance& allowance) {
  TensorAllowance at_most = allowance;
  if (Status s = limit_to_disk(&at_most); !s.ok()) return s;
  leave_out_beyond(at_most);
  tell_of_tensors();
  discard();
  if (Status s = begin_publication(files_, incidents_, name_); !s.ok()) return s;
  for (int i = 0; i < manifest_.parts_size(); ++i) {
    if (Status s = write_tensors(i); !s.ok()) return s;
  }
  if (Status s = write_texts(); !s.ok()) return s;
  return publish(files_, incidents_, name_);
}

void BundleWriter::discard() {
  if (files_.exists(partial_)) (void)remove_tree(files_, partial_);  // the next start does, otherwise
}

}  // namespace holdfast
