// The tensors of one rank, or those that all share, in one file: scanned and digested while they are
// written, and read against what the manifest says of them.
//
// An element is stored as it is in memory. complex128, which safetensors lacks, is stored as F64 with one
// more dimension of 2; the manifest tells what is stored, shard_offset and shard_total counting stored
// elements, too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "holdfast/checkpoint/manifest.pb.h"
#include "holdfast/collectives/status.h"
#include "holdfast/coord/storage/file_system.h"
#include "holdfast/coord/storage/safetensors.h"
#include "holdfast/fused_scan.h"
#include "holdfast/training_state.h"

namespace holdfast {

// rank -1: of replicated state; of that of one replica group among several when `group` is not -1.
std::string part_file_name(int rank, int group = -1);

// What safetensors calls it; "" for an unknown one. complex128 is "F64".
std::string_view stored_dtype(DType dtype);
// How the values of a stored dtype are scanned. False for what no part of ours holds.
bool parse_stored_dtype(std::string_view name, DType* dtype);

// What is to be written. The memory must stay as it is until write_part() returns.
struct PartTensor {
  std::string name;
  const void* data = nullptr;  // contiguous
  DType dtype = DType::kFloat32;
  std::vector<std::int64_t> shape;
  bool must_be_finite = true;
  bool sharded = false;
  std::int64_t shard_offset = 0;  // as in StateTensor
  std::int64_t shard_total = 0;
  bool renewable = false;  // see StateBytes
  bool is_bytes = false;   // what a StateBytes saved: kUInt8, one dimension

  static PartTensor of(const StateTensor& tensor, const void* copy);
  static PartTensor of_bytes(const std::string& name, std::string_view bytes, bool renewable = false);
};

// The entry that the manifest gets, but for `begin` and digest. USAGE for an unknown dtype or a size that
// overflows.
Status describe(const PartTensor& tensor, TensorEntry* entry);

// The first value that should not be there.
struct NonFinite {
  std::string tensor;
  std::int64_t index =
      0;  // flat, row-major; in a complex128 that was read back, of the number and not of the pair
  std::string_view value;  // "NaN", "+Inf" or "-Inf"

  std::string to_string() const;  // "conv1.weight[17] is NaN", printable
};

// Writes FOLDER/part_file_name(rank, group), syncs and closes it, and fills `out`. Larger elements come
// first, in the order given otherwise, so that each tensor is aligned for readers that map the file. INTERNAL
// when the file cannot be written; and, with `finding` set, at the first tensor that must be finite and is
// not. The file is then left unfinished: the folder is to be removed. Local; any thread.
Status write_part(FileSystem& files, const std::string& folder, int rank, std::span<const PartTensor> tensors,
                  Part* out, std::optional<NonFinite>* finding, int group = -1);

// Reads a part back. Used by one thread at a time.
class PartReader {
 public:
  // Opens FOLDER/part.file(), of which the header must be what `part` says, byte for byte. `part` must be of
  // a manifest that decode_manifest() took. INTERNAL otherwise; `size_is_right`, when given, tells whether
  // the file is at least there with its size.
  Status open(FileSystem& files, const std::string& folder, const Part& part, bool* size_is_right = nullptr);

  const std::string& path() const { return path_; }
  int tensors() const { return part_.tensors_size(); }
  const TensorEntry& tensor(int i) const { return part_.tensors(i); }

  // All bytes of tensor i into `to`, which is exactly as large. INTERNAL when they are not those that were
  // written, or, with `finding` set, when they are and hold what is not finite and must be; `to` is undefined
  // then.
  Status read_tensor(int i, std::span<std::byte> to, std::optional<NonFinite>* finding);
  // The same judgement, and the bytes are not kept.
  Status check_tensor(int i, std::optional<NonFinite>* finding);

 private:
  template <typename Place>
  Status judge(int i, Place place, std::optional<NonFinite>* finding);

  std::string path_;
  Part part_;
  std::uint64_t data_begins_ = 0;
  std::unique_ptr<ReadableFile> file_;
  std::vector<std::byte> block_;  // of check_tensor()
};

}  // namespace holdfast
