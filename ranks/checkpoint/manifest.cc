// What is refused of a manifest, beside one that is not its own encoding byte for byte: more than there can
// be of anything; a part that is there twice, of a rank that the run did not have, or under another name than
// its rank's; replica groups that are there twice, and parts of none of them; tensors that are not one behind
// the other, not as large as dtype and shape say, of the same name as another that a rank holds, or outside
// of the array of which they are a shard.
#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/wire_format_lite.h>

#include <algorithm>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "holdfast/checkpoint/generation.h"
#include "holdfast/checkpoint/manifest.pb.h"
#include "holdfast/coord/printable.h"
#include "holdfast/coord/storage/sha256.h"
#include "manifest_limits.h"
#include "part_file.h"
#include "state_limits.h"

namespace holdfast {
namespace {

using google::protobuf::internal::WireFormatLite;
using Input = google::protobuf::io::CodedInputStream;

constexpr std::uint32_t kVersion = 1;
constexpr std::uint64_t kDigestBytes = 32;
constexpr std::uint64_t kSmallestHeader = 8 + 2;
constexpr std::uint64_t kLargestHeader = 8 + 100'000'000;

// What a payload is made of, counted before anything is allocated for it: two bytes can stand for a message
// of a hundred.
struct Census {
  std::uint64_t fields = 0;
  std::uint64_t parts = 0;
  std::uint64_t tensors = 0;

  bool fits() const {
    return fields <= kMostManifestFields && parts <= kMostManifestRanks + 1 &&
           tensors <= kMostManifestTensors;
  }
};

// Counts the fields at one level, and those in `inner` (the number of a field that has a length) by
// `descend`.
template <typename Descend>
bool count_fields(Input* input, int inner, Census* census, Descend descend) {
  while (const std::uint32_t tag = input->ReadTag()) {
    ++census->fields;
    const auto type = WireFormatLite::GetTagWireType(tag);
    if (type == WireFormatLite::WIRETYPE_START_GROUP) return false;
    const bool enters =
        WireFormatLite::GetTagFieldNumber(tag) == inner && type == WireFormatLite::WIRETYPE_LENGTH_DELIMITED;
    if (enters ? !descend(input) : !WireFormatLite::SkipField(input, tag)) return false;
    if (!census->fits()) return false;
  }
  return true;
}

template <typename Descend>
bool count_message(Input* input, int inner, Census* census, Descend descend) {
  const Input::Limit limit = input->ReadLengthAndPushLimit();
  const bool counted = count_fields(input, inner, census, descend) && input->ConsumedEntireMessage();
  input->PopLimit(limit);
  return counted;
}

Input input_of(std::string_view bytes) {
  return Input(reinterpret_cast<const std::uint8_t*>(bytes.data()), static_cast<int>(bytes.size()));
}

bool refuse(Input*) { return false; }

bool file_within_limits(std::string_view bytes) {
  Census census = {.fields = kMostManifestFields - 3};
  Input input = input_of(bytes);
  return count_fields(&input, -1, &census, refuse) && input.ConsumedEntireMessage();
}

bool payload_within_limits(std::string_view payload) {
  Census census;
  Input input = input_of(payload);
  const auto tensor = [&](Input* at) {
    ++census.tensors;
    // Of a packed shape each byte would be a number; ours is not packed.
    return count_message(at, TensorEntry::kShapeFieldNumber, &census, refuse);
  };
  const auto part = [&](Input* at) {
    ++census.parts;
    return count_message(at, Part::kTensorsFieldNumber, &census, tensor);
  };
  return count_fields(&input, Manifest::kPartsFieldNumber, &census, part) && input.ConsumedEntireMessage();
}

// Each gives why something cannot be; "" when it can.

std::string fault_of_shard(const TensorEntry& tensor, std::uint64_t elements, bool replicated) {
  if (tensor.has_shard_offset() != tensor.has_shard_total()) return "has half of a shard's place";
  if (!tensor.has_shard_offset()) return "";
  if (replicated) return "is a shard, and of no rank";
  const bool inside = tensor.shard_offset() <= tensor.shard_total() &&
                      elements <= tensor.shard_total() - tensor.shard_offset();
  constexpr std::uint64_t kMost = std::numeric_limits<std::int64_t>::max() / 16;
  return inside && tensor.shard_total() <= kMost ? "" : "is a shard outside of its array";
}

std::string fault_of_tensor(const TensorEntry& tensor, std::uint64_t at, bool replicated) {
  const std::string& name = tensor.name();
  if (name.empty() || name.size() > kLongestStateName || !is_utf8(name) || name == kReservedStateName) {
    return "has a name that is none";
  }
  const bool all_there = tensor.has_dtype() && tensor.has_begin() && tensor.has_bytes() &&
                         tensor.has_digest_high() && tensor.has_digest_low();
  if (!all_there) return "is not told in full";
  DType dtype = DType::kUInt8;
  if (!parse_stored_dtype(tensor.dtype(), &dtype)) return "has an unknown dtype";
  if (static_cast<std::size_t>(tensor.shape_size()) > kMostStateDimensions + 1)
    return "has too many dimensions";
  std::int64_t bytes = dtype_size(dtype);
  for (const std::uint64_t extent : tensor.shape()) {
    if (__builtin_mul_overflow(bytes, extent, &bytes)) return "has a size that overflows";
  }
  if (tensor.begin() != at) return "does not follow the one before it";
  if (tensor.bytes() != static_cast<std::uint64_t>(bytes))
    return "has another size than its dtype and shape have";
  if (tensor.is_bytes() &&
      (dtype != DType::kUInt8 || tensor.shape_size() != 1 || tensor.has_shard_offset())) {
    return "is neither a tensor nor bytes";
  }
  return fault_of_shard(tensor, static_cast<std::uint64_t>(bytes / dtype_size(dtype)), replicated);
}

// `names` are those of its group's replicated part, and get this one's when it is that.
std::string fault_of_part(const Part& part, std::set<std::string_view>* names) {
  const bool replicated = !part.has_rank();
  if (part.header_sha256().size() != kDigestBytes) return "has no digest of its header";
  std::set<std::string_view> own;
  std::uint64_t at = 0;
  for (const TensorEntry& tensor : part.tensors()) {
    const auto fails = [&](const std::string& how) {
      return "has a tensor, \"" + tensor.name() + "\", that " + how;
    };
    if (const std::string fault = fault_of_tensor(tensor, at, replicated); !fault.empty())
      return fails(fault);
    if (names->contains(tensor.name()) || !own.insert(tensor.name()).second) return fails("is there twice");
    if (__builtin_add_overflow(at, tensor.bytes(), &at)) return fails("ends beyond 2^64 bytes");
  }
  const bool sizes_agree = part.file_bytes() >= at && part.file_bytes() - at >= kSmallestHeader &&
                           part.file_bytes() - at <= kLargestHeader;
  if (!sizes_agree) return "has another size than its tensors have";
  if (replicated) *names = std::move(own);
  return "";
}

std::string fault_of_groups(const Manifest& manifest) {
  if (manifest.groups_size() == 0) return "";
  if (manifest.groups_size() == 1 || static_cast<std::uint32_t>(manifest.groups_size()) > manifest.ranks()) {
    return "has a number of replica groups that cannot be";
  }
  std::set<std::string_view> names;
  for (const std::string& name : manifest.groups()) {
    if (name.empty() || name.size() > kLongestStateName || !is_utf8(name))
      return "has a replica group without a name";
    if (!names.insert(name).second) return "has the replica group \"" + name + "\" twice";
  }
  return "";
}

// -1 when there are none.
int group_of(const Part& part) { return part.has_group() ? static_cast<int>(part.group()) : -1; }

bool is_of_a_group(const Part& part, const Manifest& manifest) {
  return part.has_group() ? part.group() < static_cast<std::uint32_t>(manifest.groups_size())
                          : manifest.groups_size() == 0;
}

std::string fault_of(const Manifest& manifest) {
  const bool all_there =
      manifest.has_epoch() && manifest.has_attempt() && manifest.has_update() && manifest.has_skips();
  if (!all_there) return "does not say where the run was";
  if (manifest.ranks() < 1 || manifest.ranks() > kMostManifestRanks)
    return "has a number of ranks that cannot be";
  // Other readers of Protobuf refuse such a message altogether.
  if (!is_utf8(manifest.time()) || !is_utf8(manifest.version())) return "has text that is no UTF-8";
  if (const std::string fault = fault_of_groups(manifest); !fault.empty()) return fault;
  std::vector<std::set<std::string_view>> replicated(
      static_cast<std::size_t>(std::max(manifest.groups_size(), 1)));
  std::pair<int, int> after(-2, 0);
  for (const Part& part : manifest.parts()) {
    const int rank = part.has_rank() ? part.rank() : -1;
    const bool known = rank < static_cast<int>(manifest.ranks()) && (!part.has_rank() || rank >= 0);
    if (known && !is_of_a_group(part, manifest))
      return "has a part of no replica group: \"" + part.file() + "\"";
    const int group = group_of(part);
    if (!known || part.file() != part_file_name(rank, group))
      return "has a file that is no part: \"" + part.file() + "\"";
    const std::pair at(rank, rank < 0 ? group : 0);
    if (at <= after) return "has its parts twice or in disorder";
    after = at;
    std::set<std::string_view>& shared = replicated[static_cast<std::size_t>(std::max(group, 0))];
    if (const std::string fault = fault_of_part(part, &shared); !fault.empty())
      return part.file() + " " + fault;
  }
  return "";
}

Status damaged(const std::string& how) {
  return Status::internal("the manifest is damaged: " + printable(how));
}

}  // namespace

std::string encode_manifest(const Manifest& manifest) {
  ManifestFile file;
  file.set_version(kVersion);
  file.set_payload(manifest.SerializeAsString());
  file.set_sha256(sha256(file.payload()));
  return file.SerializeAsString();
}

// The canonical encoding is the only one that is read back.
std::string manifest_sha256(const Manifest& manifest) { return hex(sha256(encode_manifest(manifest))); }

Status decode_manifest(std::string_view bytes, Manifest* out) {
  out->Clear();
  if (bytes.size() > kLargestManifest) return damaged("it is larger than 256 MB");
  ManifestFile file;
  const bool parsed =
      file_within_limits(bytes) && file.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()));
  if (!parsed || !file.has_version()) return damaged("it is none");
  if (file.version() != kVersion) {
    return Status::internal("the manifest is of version " + std::to_string(file.version()) +
                            "; this program reads version " + std::to_string(kVersion));
  }
  if (file.sha256() != sha256(file.payload())) return damaged("its SHA-256 is another");
  if (!payload_within_limits(file.payload())) return damaged("it is none, or too large");
  Manifest manifest;
  if (!manifest.ParseFromString(file.payload())) return damaged("it is none");
  // Bytes that Protobuf would overlook, such as fields that it does not know or that are there twice.
  manifest.DiscardUnknownFields();
  if (encode_manifest(manifest) != bytes) return damaged("it holds what does not belong there");
  if (const std::string fault = fault_of(manifest); !fault.empty()) return damaged("it " + fault);
  out->Swap(&manifest);
  return Status();
}

}  // namespace holdfast
