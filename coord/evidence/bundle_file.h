// What a bundle's folder is made of, for its writer and its reader.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "holdfast/collectives/status.h"
#include "holdfast/coord/storage/safetensors.h"

namespace google::protobuf {
class Message;
}

namespace holdfast {

class BundleFile;
class BundleManifest;
class EvidencePart;

inline constexpr std::string_view kBundleManifestName = "manifest.pb";
inline constexpr std::string_view kManifestJsonName = "manifest.json";
inline constexpr std::string_view kReportJsonName = "report.json";
inline constexpr std::string_view kReportMarkdownName = "report.md";
// Grows after the bundle was published, and is not checked with it.
inline constexpr std::string_view kExperimentsName = "experiments.jsonl";

std::string rank_tensors_name(int rank);  // "rank-00007.safetensors"

// What the header of that file says, for the part's tensors in their order: names that are unique and UTF-8,
// such as "batch.0/input", made of role, micro-batch and name. `begin` and `end` are not set.
std::vector<SafetensorsEntry> header_entries(const EvidencePart& part);

// `text` with U+FFFD for what is no UTF-8.
std::string as_utf8(const std::string& text);
// All fields of type string, at any depth: those that are no UTF-8 are made so.
void make_strings_utf8(google::protobuf::Message* message);

// XXH3-128.
struct TensorDigest {
  std::uint64_t high = 0;
  std::uint64_t low = 0;
  bool operator==(const TensorDigest&) const = default;
};
TensorDigest tensor_digest(std::string_view bytes);

// With version and content id, without `files`.
BundleFile bundle_file(const BundleManifest& manifest);
std::string encode_bundle(const BundleFile& file);

// Takes anything. INTERNAL, saying what is wrong, for whatever is not exactly what a writer makes: see
// bundle_file.cc.
Status decode_bundle(std::string_view bytes, BundleFile* file, BundleManifest* manifest);

}  // namespace holdfast
