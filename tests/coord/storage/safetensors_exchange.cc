// The other side of safetensors_exchange.py: safetensors_exchange write FILE | read FILE
//
// write makes a file of every dtype, byte i of the data being i * 7 mod 256. read prints a line for each
// tensor: name and metadata as hex, dtype, shape, bytes as hex; or why the file is refused, with exit code 1.
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "holdfast/coord/storage/publication.h"
#include "holdfast/coord/storage/safetensors.h"
#include "holdfast/coord/storage/sha256.h"

namespace holdfast {
namespace {

Status write(const std::string& path) {
  std::vector<SafetensorsEntry> tensors;
  for (const char* dtype : {"F64", "I64", "U64", "C64", "F32", "I32", "U32", "F16", "BF16", "I16", "U16",
                            "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "BOOL"}) {
    tensors.push_back({std::string("of/") + dtype, dtype, {2, 3}, 0, 0});
    tensors.push_back({std::string("scalar of ") + dtype, dtype, {}, 0, 0});
    tensors.push_back({std::string("none of ") + dtype, dtype, {3, 0}, 0, 0});
  }
  tensors.push_back({"\xc3\xa9 \"\\\n\x01", "U8", {1}, 0, 0});
  std::string bytes;
  if (Status s = write_safetensors_header(&tensors, {{"format", "pt"}, {"k\n", "\xe2\x82\xac"}}, &bytes);
      !s.ok())
    return s;
  for (std::uint64_t i = 0; i < tensors.back().end; ++i) bytes += static_cast<char>(i * 7 % 256);
  return write_synced(real_file_system(), path, bytes);
}

Status read(const std::string& path) {
  std::unique_ptr<ReadableFile> file;
  if (Status s = real_file_system().open_file(path, &file); !s.ok()) return s;
  SafetensorsHeader header;
  if (Status s = read_safetensors_header(*file, &header); !s.ok()) return s;
  for (const auto& [key, value] : header.metadata)
    std::printf("metadata %s %s\n", hex(key).c_str(), hex(value).c_str());
  for (const SafetensorsEntry& tensor : header.tensors) {
    std::string bytes(tensor.end - tensor.begin, '\0');
    if (Status s = file->read(header.bytes + tensor.begin, std::as_writable_bytes(std::span(bytes))); !s.ok())
      return s;
    std::printf("tensor %s %s [", hex(tensor.name).c_str(), tensor.dtype.c_str());
    for (std::size_t i = 0; i < tensor.shape.size(); ++i) {
      std::printf("%s%llu", i == 0 ? "" : ",", static_cast<unsigned long long>(tensor.shape[i]));
    }
    std::printf("] %s\n", hex(bytes).c_str());
  }
  return Status();
}

}  // namespace
}  // namespace holdfast

int main(int argc, char** argv) {
  if (argc != 3) return 64;
  const bool writes = std::strcmp(argv[1], "write") == 0;
  const holdfast::Status status = writes ? holdfast::write(argv[2]) : holdfast::read(argv[2]);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.message().c_str());
  return status.ok() ? 0 : 1;
}
