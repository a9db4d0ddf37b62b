// safetensors, the public format for tensors in a file:
//
//   8 bytes       length n of the header, little-endian
//   n bytes       JSON: {"NAME": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ...,
//                 "__metadata__": {"key": "value", ...}}, padded with spaces to a multiple of 8
//   the rest      the tensors' bytes, row-major, little-endian, without gaps; offsets count from here
//
// Reads what other writers write and is read by other readers. Source: the format's own specification and its
// reference implementation's validation: offsets in order and contiguous, the last one the end of the file.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "holdfast/collectives/status.h"
#include "holdfast/coord/storage/file_system.h"

namespace holdfast {

struct SafetensorsEntry {
  std::string name;
  std::string dtype;                 // "F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "C64", "I64", ..., "U8", "BOOL"
  std::vector<std::uint64_t> shape;  // {} for a scalar
  std::uint64_t begin = 0;           // of its bytes, counted from the end of the header
  std::uint64_t end = 0;
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> tensors;  // in the order of their bytes
  std::map<std::string, std::string> metadata;
  std::uint64_t bytes = 0;  // of length and header together: where the tensors' bytes begin
};

// Bytes of one element; 0 for a dtype that the format does not have.
std::uint64_t safetensors_dtype_size(std::string_view dtype);

// Length and header, ready to be written, for tensors whose bytes follow in this order; sets begin and end of each
// entry. INTERNAL for a name that is taken twice, is no UTF-8 or is "__metadata__", for an unknown dtype and for sizes
// that overflow.
Status write_safetensors_header(std::vector<SafetensorsEntry>* tensors,
                                const std::map<std::string, std::string>& metadata, std::string* out);

// Takes anything. INTERNAL, saying what is wrong, for whatever is not exactly the format: see safetensors.cc for the
// list. `file_bytes` is the size of the whole file, `start` the file from its beginning, at least as much of it as the
// header takes.
Status parse_safetensors_header(std::string_view start, std::uint64_t file_bytes, SafetensorsHeader* out);

// The same from a file. `raw`, when given, gets length and header as they are in the file, for a digest.
Status read_safetensors_header(const ReadableFile& file, SafetensorsHeader* out, std::string* raw = nullptr);

}  // namespace holdfast
