// Whatever is taken for a bundle's manifest is its own encoding, byte for byte, leads to no file but a
// bundle's own, and says nothing that its readers cannot rely on.
//
// Nothing found at random has a right content id. So the input is taken for a payload, too, and given one.
#include <cstdint>
#include <limits>
#include <set>
#include <string>

#include "evidence/bundle_file.h"
#include "fuzz/expect.h"
#include "holdfast/coord/evidence/evidence.pb.h"
#include "holdfast/coord/evidence/manifest_json.h"
#include "holdfast/coord/storage/safetensors.h"

namespace holdfast {
namespace {

void check_part(const EvidencePart& part, const BundleManifest& manifest, std::set<std::string>* files) {
  EXPECT(part.rank() >= 0 && static_cast<std::uint64_t>(part.rank()) < manifest.ranks());
  std::uint64_t at = 0;
  for (const EvidenceTensor& tensor : part.tensors()) {
    EXPECT(tensor.file() == rank_tensors_name(part.rank()) && !tensor.has_data());
    EXPECT(tensor.file().find('/') == std::string::npos);
    std::uint64_t bytes = safetensors_dtype_size(tensor.dtype());
    EXPECT(bytes > 0);
    for (const std::uint64_t extent : tensor.shape()) EXPECT(!__builtin_mul_overflow(bytes, extent, &bytes));
    EXPECT(tensor.begin() == at && tensor.bytes() == bytes);
    EXPECT(bytes <= std::numeric_limits<std::uint64_t>::max() - at);
    at += bytes;
  }
  std::set<std::string> names;
  for (const SafetensorsEntry& entry : header_entries(part)) EXPECT(names.insert(entry.name).second);
  if (part.tensors_size() > 0) EXPECT(files->insert(rank_tensors_name(part.rank())).second);
}

void fuzz(const std::string& bytes) {
  BundleFile file;
  BundleManifest manifest;
  if (!decode_bundle(bytes, &file, &manifest).ok()) {
    EXPECT(file.ByteSizeLong() == 0 && manifest.ByteSizeLong() == 0);
    return;
  }
  BundleFile again = bundle_file(manifest);
  EXPECT(again.content_id() == file.content_id());
  *again.mutable_files() = file.files();
  EXPECT(encode_bundle(again) == bytes);
  std::set<std::string> files;
  for (const EvidencePart& part : manifest.parts()) check_part(part, manifest, &files);
  std::set<std::string> told;
  for (const Named& one : manifest.files()) EXPECT(told.insert(one.name()).second);
  EXPECT(told == files && manifest.compact() == files.empty());
  for (const Named& one : file.files()) EXPECT(one.name().find('/') == std::string::npos);
  using Json = nlohmann::ordered_json;
  const std::string json = manifest_json(manifest, "id").dump(1, ' ', true, Json::error_handler_t::replace);
  EXPECT(Json::accept(json));
}

}  // namespace
}  // namespace holdfast

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string bytes(reinterpret_cast<const char*>(data), size);
  holdfast::fuzz(bytes);
  holdfast::BundleManifest manifest;
  if (!manifest.ParseFromString(bytes)) return 0;
  holdfast::fuzz(holdfast::encode_bundle(holdfast::bundle_file(manifest)));
  return 0;
}
