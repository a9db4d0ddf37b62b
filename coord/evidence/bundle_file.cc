// What is refused of a manifest, beside one that is not its own encoding byte for byte, or not the one of
// which it carries the content id: more than there can be of anything; a text that is no UTF-8; a stage that
// is none; parts that are not in the order of their ranks, or of ranks that the run did not have; tensors
// that are in another file than their rank's, not one behind the other or not as large as dtype and shape
// say; files that are not exactly those of the tensors; tensors in a compact bundle.
#include "bundle_file.h"

#include <fmt/format.h>
#include <google/protobuf/descriptor.h>
#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/message.h>
#include <google/protobuf/wire_format_lite.h>
#include <xxhash.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "bundle_limits.h"
#include "canonical.h"
#include "holdfast/collectives/record.h"
#include "holdfast/coord/evidence/evidence.pb.h"
#include "holdfast/coord/printable.h"
#include "holdfast/coord/storage/sha256.h"

namespace holdfast {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::internal::WireFormatLite;
using Input = google::protobuf::io::CodedInputStream;

constexpr std::uint32_t kVersion = 1;
constexpr std::size_t kHexDigits = 64;

// What a payload is made of, counted before anything is allocated for it: two bytes can stand for a message
// of hundreds.
struct Census {
  std::uint64_t fields = 0;
  std::uint64_t messages = 0;

  bool fits() const { return fields <= kMostBundleFields && messages <= kMostBundleMessages; }
};

bool count_fields(Input* input, const Descriptor* type, Census* census) {
  while (const std::uint32_t tag = input->ReadTag()) {
    ++census->fields;
    const auto wire = WireFormatLite::GetTagWireType(tag);
    const FieldDescriptor* field = type->FindFieldByNumber(WireFormatLite::GetTagFieldNumber(tag));
    if (field == nullptr || wire == WireFormatLite::WIRETYPE_START_GROUP || !census->fits()) return false;
    const bool has_length = wire == WireFormatLite::WIRETYPE_LENGTH_DELIMITED;
    if (has_length && field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
      ++census->messages;
      // As deep as evidence.proto is, which has no message in itself.
      const Input::Limit limit = input->ReadLengthAndPushLimit();
      const bool counted =
          count_fields(input, field->message_type(), census) && input->ConsumedEntireMessage();
      input->PopLimit(limit);
      if (!counted) return false;
    } else {
      // Of numbers that are packed each byte would be one; ours are not.
      if (has_length && field->cpp_type() != FieldDescriptor::CPPTYPE_STRING) return false;
      if (!WireFormatLite::SkipField(input, tag)) return false;
    }
  }
  return census->fits();
}

bool within_limits(std::string_view bytes, const Descriptor* type) {
  Census census;
  Input input(reinterpret_cast<const std::uint8_t*>(bytes.data()), static_cast<int>(bytes.size()));
  return count_fields(&input, type, &census) && input.ConsumedEntireMessage();
}

// `visit(text)` for every field of type string, until one gives false.
template <typename Visit>
bool all_strings(const Message& message, Visit visit) {
  std::vector<const FieldDescriptor*> fields;
  const auto& in = *message.GetReflection();
  in.ListFields(message, &fields);
  for (const FieldDescriptor* field : fields) {
    const int size = field->is_repeated() ? in.FieldSize(message, field) : -1;
    if (field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
      if (size < 0 && !all_strings(in.GetMessage(message, field), visit)) return false;
      for (int i = 0; i < size; ++i) {
        if (!all_strings(in.GetRepeatedMessage(message, field, i), visit)) return false;
      }
    } else if (field->type() == FieldDescriptor::TYPE_STRING) {
      if (size < 0 && !visit(in.GetString(message, field))) return false;
      for (int i = 0; i < size; ++i) {
        if (!visit(in.GetRepeatedString(message, field, i))) return false;
      }
    }
  }
  return true;
}

bool is_hex_digest(const std::string& text) {
  return text.size() == kHexDigits && text.find_first_not_of("0123456789abcdef") == std::string::npos;
}

bool is_stage(int stage) { return stage >= 0 && stage < kStageCount; }

// Each gives why something cannot be; "" when it can.

std::string fault_of_tensor(const EvidenceTensor& tensor, const std::string& file, std::uint64_t at) {
  const bool all_there = tensor.has_name() && tensor.has_role() && tensor.has_dtype() && tensor.has_begin() &&
                         tensor.has_bytes() && tensor.has_digest_high() && tensor.has_digest_low();
  if (!all_there || tensor.has_data()) return "is not told as it should be";
  if (tensor.file() != file) return "is in another file than its rank's";
  if (tensor.micro_batch() < -1) return "is of a micro-batch that cannot be";
  std::uint64_t bytes = safetensors_dtype_size(tensor.dtype());
  if (bytes == 0) return "has an unknown dtype";
  for (const std::uint64_t extent : tensor.shape()) {
    if (__builtin_mul_overflow(bytes, extent, &bytes)) return "has a size that overflows";
  }
  if (tensor.begin() != at) return "does not follow the one before it";
  return tensor.bytes() == bytes ? "" : "has another size than its dtype and shape have";
}

std::string fault_of_part(const EvidencePart& part) {
  const std::string file = rank_tensors_name(part.rank());
  std::uint64_t at = 0;
  for (const EvidenceTensor& tensor : part.tensors()) {
    const auto fails = [&](const std::string& how) {
      return "has a tensor, \"" + tensor.name() + "\", that " + how;
    };
    if (const std::string fault = fault_of_tensor(tensor, file, at); !fault.empty()) return fails(fault);
    if (__builtin_add_overflow(at, tensor.bytes(), &at)) return fails("ends beyond 2^64 bytes");
  }
  const bool stages = std::ranges::all_of(part.stages(), [](const auto& s) { return is_stage(s.stage()); }) &&
                      std::ranges::all_of(part.layers(), [](const auto& s) { return is_stage(s.stage()); });
  return stages ? "" : "has a stage that is none";
}

std::string fault_of_files(const BundleManifest& manifest) {
  int i = 0;
  for (const EvidencePart& part : manifest.parts()) {
    if (part.tensors_size() == 0) continue;
    const bool there = i < manifest.files_size() &&
                       manifest.files(i).name() == rank_tensors_name(part.rank()) &&
                       is_hex_digest(manifest.files(i).value());
    if (!there) return "does not tell the digest of " + rank_tensors_name(part.rank());
    ++i;
  }
  if (i < manifest.files_size()) return "has a file without tensors: \"" + manifest.files(i).name() + "\"";
  return manifest.compact() == (i == 0) ? "" : "is compact and has tensors, or has none and is not";
}

std::string fault_of(const BundleManifest& manifest) {
  const bool all_there = manifest.has_epoch() && manifest.has_attempt() && manifest.has_compact();
  if (!all_there) return "does not say of which incident it is";
  if (manifest.ranks() < 1 || manifest.ranks() > kMostBundleRanks)
    return "has a number of ranks that cannot be";
  if (!all_strings(manifest, [](const std::string& text) { return is_utf8(text); })) {
    return "has text that is no UTF-8";
  }
  const bool stages = (!manifest.has_stage() || is_stage(manifest.stage())) &&
                      std::ranges::all_of(manifest.origins(), [](const auto& s) {
                        return !s.has_stage() || is_stage(s.stage());
                      });
  if (!stages) return "has a stage that is none";
  int after = -1;
  for (const EvidencePart& part : manifest.parts()) {
    const bool known =
        part.has_rank() && part.rank() >= 0 && static_cast<std::uint64_t>(part.rank()) < manifest.ranks();
    if (!known) return "has a part of a rank that the run did not have";
    if (part.rank() <= after) return "has its parts twice or in disorder";
    after = part.rank();
    if (const std::string fault = fault_of_part(part); !fault.empty()) {
      return "has a part of rank " + std::to_string(after) + " that " + fault;
    }
  }
  return fault_of_files(manifest);
}

// manifest.json first, then a report if there is one.
std::string fault_of_texts(const BundleFile& file) {
  std::vector<std::string_view> left = {kManifestJsonName, kReportJsonName, kReportMarkdownName};
  for (const Named& text : file.files()) {
    const auto found = std::ranges::find(left, text.name());
    if (found == left.end() || !is_hex_digest(text.value())) {
      return "has a file that is none of a bundle's, twice or without a digest: \"" + text.name() + "\"";
    }
    left.erase(left.begin(), found + 1);
  }
  return "";
}

Status damaged(const std::string& how) {
  return Status::internal("the manifest is damaged: " + printable(how));
}

std::string_view role_name(EvidenceTensor::Role role) {
  switch (role) {
    case EvidenceTensor::BATCH: return "batch";
    case EvidenceTensor::STATE: return "state";
    case EvidenceTensor::SEEN: return "seen";
  }
  return "other";
}

}  // namespace

std::string rank_tensors_name(int rank) { return fmt::format("rank-{:05}.safetensors", rank); }

std::string as_utf8(const std::string& text) {
  if (is_utf8(text)) return text;
  using nlohmann::json;
  return json::parse(json(text).dump(-1, ' ', false, json::error_handler_t::replace)).get<std::string>();
}

void make_strings_utf8(Message* message) {
  std::vector<const FieldDescriptor*> fields;
  const auto& in = *message->GetReflection();
  in.ListFields(*message, &fields);
  for (const FieldDescriptor* field : fields) {
    const int size = field->is_repeated() ? in.FieldSize(*message, field) : -1;
    if (field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
      if (size < 0) make_strings_utf8(in.MutableMessage(message, field));
      for (int i = 0; i < size; ++i) make_strings_utf8(in.MutableRepeatedMessage(message, field, i));
    } else if (field->type() == FieldDescriptor::TYPE_STRING) {
      if (size < 0) in.SetString(message, field, as_utf8(in.GetString(*message, field)));
      for (int i = 0; i < size; ++i) {
        in.SetRepeatedString(message, field, i, as_utf8(in.GetRepeatedString(*message, field, i)));
      }
    }
  }
}

std::vector<SafetensorsEntry> header_entries(const EvidencePart& part) {
  std::vector<SafetensorsEntry> entries;
  std::set<std::string> taken;
  for (const EvidenceTensor& tensor : part.tensors()) {
    SafetensorsEntry& entry = entries.emplace_back();
    std::string name(role_name(tensor.role()));
    if (tensor.micro_batch() >= 0) name += "." + std::to_string(tensor.micro_batch());
    name += "/" + as_utf8(tensor.name());
    // The same twice: names that were no UTF-8, or a trainer's own doing. No other name begins like this.
    if (!taken.insert(name).second) name.insert(0, "again." + std::to_string(entries.size() - 1) + "/");
    entry.name = name;
    entry.dtype = tensor.dtype();
    entry.shape.assign(tensor.shape().begin(), tensor.shape().end());
  }
  return entries;
}

TensorDigest tensor_digest(std::string_view bytes) {
  const XXH128_hash_t value = XXH3_128bits(bytes.data(), bytes.size());
  return {value.high64, value.low64};
}

BundleFile bundle_file(const BundleManifest& manifest) {
  BundleFile file;
  file.set_version(kVersion);
  file.set_content_id(sha256(canonical_manifest(manifest)));
  file.set_payload(manifest.SerializeAsString());
  return file;
}

std::string encode_bundle(const BundleFile& file) { return file.SerializeAsString(); }

Status decode_bundle(std::string_view bytes, BundleFile* file, BundleManifest* manifest) {
  file->Clear();
  manifest->Clear();
  if (bytes.size() > kLargestBundleManifest) return damaged("it is larger than 64 MiB");
  BundleFile read;
  const bool parsed = within_limits(bytes, BundleFile::descriptor()) &&
                      read.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()));
  if (!parsed || !read.has_version()) return damaged("it is none");
  if (read.version() != kVersion) {
    return Status::internal("the manifest is of version " + std::to_string(read.version()) +
                            "; this program reads version " + std::to_string(kVersion));
  }
  BundleManifest told;
  if (!within_limits(read.payload(), BundleManifest::descriptor()) || !told.ParseFromString(read.payload())) {
    return damaged("it is none, or too large");
  }
  // Bytes that Protobuf would overlook, such as fields that it does not know or that are there twice.
  told.DiscardUnknownFields();
  if (read.content_id() != sha256(canonical_manifest(told))) return damaged("its content id is another");
  BundleFile again = bundle_file(told);
  *again.mutable_files() = read.files();
  if (encode_bundle(again) != bytes) return damaged("it holds what does not belong there");
  if (const std::string fault = fault_of(told); !fault.empty()) return damaged("it " + fault);
  if (const std::string fault = fault_of_texts(read); !fault.empty()) return damaged("it " + fault);
  file->Swap(&read);
  manifest->Swap(&told);
  return Status();
}

}  // namespace holdfast
