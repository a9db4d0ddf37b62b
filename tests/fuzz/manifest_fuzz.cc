// Whatever is taken for a manifest is its own encoding, byte for byte, and says nothing that its readers
// cannot rely on.
//
// Nothing found at random has a right SHA-256. So the input is taken for a payload, too, and given one.
#include <cstdint>
#include <set>
#include <string>
#include <string_view>

#include "fuzz/expect.h"
#include "holdfast/checkpoint/generation.h"
#include "holdfast/checkpoint/manifest.pb.h"
#include "holdfast/coord/storage/safetensors.h"
#include "holdfast/coord/storage/sha256.h"

namespace holdfast {
namespace {

void check_part(const Part& part, std::uint32_t ranks, std::set<std::string>* names) {
  EXPECT(part.file().find('/') == std::string::npos);
  EXPECT(!part.has_rank() || (part.rank() >= 0 && static_cast<std::uint32_t>(part.rank()) < ranks));
  std::uint64_t at = 0;
  std::set<std::string> own;
  for (const TensorEntry& tensor : part.tensors()) {
    std::uint64_t bytes = safetensors_dtype_size(tensor.dtype());
    EXPECT(bytes > 0);
    for (const std::uint64_t extent : tensor.shape()) EXPECT(!__builtin_mul_overflow(bytes, extent, &bytes));
    EXPECT(tensor.begin() == at && tensor.bytes() == bytes);
    at += bytes;
    EXPECT(!names->contains(tensor.name()) && own.insert(tensor.name()).second);
    EXPECT(tensor.shard_offset() <= tensor.shard_total());
  }
  EXPECT(part.file_bytes() > at);
  if (!part.has_rank()) *names = own;
}

void fuzz(const std::string& bytes) {
  Manifest manifest;
  if (!decode_manifest(bytes, &manifest).ok()) {
    EXPECT(manifest.ByteSizeLong() == 0);
    return;
  }
  EXPECT(encode_manifest(manifest) == bytes);
  std::set<std::string> files;
  std::set<std::string> names;
  for (const Part& part : manifest.parts()) {
    EXPECT(files.insert(part.file()).second);
    check_part(part, manifest.ranks(), &names);
  }
}

}  // namespace
}  // namespace holdfast

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string bytes(reinterpret_cast<const char*>(data), size);
  holdfast::fuzz(bytes);
  holdfast::ManifestFile file;
  file.set_version(1);
  file.set_payload(bytes);
  file.set_sha256(holdfast::sha256(bytes));
  holdfast::fuzz(file.SerializeAsString());
  return 0;
}
