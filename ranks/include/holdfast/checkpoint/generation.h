// One published checkpoint on disk, and how it is judged. No MPI and no trainer needed.
//
//   RUN_DIR/checkpoints/
//     e0001-a0000000600/          a generation: the state before attempt 600, written in epoch 1
//       manifest.pb               see ranks/checkpoint/manifest.proto
//       replicated.safetensors    what all ranks share, written by rank 0
//       group-00001.safetensors   instead, with several replica groups: what one of them shares, by its first
//       rank rank-00003.safetensors    rank 3's own, if it has any
//     .e0001-a0000000900.partial/ being written, or left by a run that was killed
//     set-aside/                  refused at a restore, or left behind by a rollback; never deleted by us,
//     never restored
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "holdfast/collectives/status.h"
#include "holdfast/coord/generation_id.h"
#include "holdfast/coord/storage/file_system.h"

namespace holdfast {

class Manifest;

std::string checkpoints_path(const std::string& run_dir);
std::string generation_path(const std::string& checkpoints, const GenerationId& id);
inline constexpr std::string_view kManifestName = "manifest.pb";
inline constexpr std::string_view kSetAsideName = "set-aside";

// By id, oldest first; names that are none are passed over. No folder: none.
Status list_generations(FileSystem& files, const std::string& checkpoints, std::vector<GenerationId>* out);

// Reads and checks manifest.pb: version, SHA-256, sizes, names of files without a path, every part's tensors
// contiguous and as large as dtype and shape say, id the folder's. INTERNAL, saying what is wrong, otherwise.
// Takes anything.
Status read_manifest(FileSystem& files, const std::string& checkpoints, const GenerationId& id,
                     Manifest* out);

// The file for `manifest`: see read_manifest().
std::string encode_manifest(const Manifest& manifest);
// Why `bytes` are none that encode_manifest() gave of a sound manifest; ok when they are. For
// read_manifest(), and for bytes that came another way.
Status decode_manifest(std::string_view bytes, Manifest* out);
// SHA-256 of that file, in hexadecimal: it has a digest of every part, so it stands for the generation's
// every byte.
std::string manifest_sha256(const Manifest& manifest);

// Files in the generation's folder that look like parts and are not in its manifest (`extra`), and that look
// like nothing of ours (`strangers`). INTERNAL when the folder cannot be read.
Status unexpected_files(FileSystem& files, const std::string& generation, const Manifest& manifest,
                        std::vector<std::string>* extra, std::vector<std::string>* strangers);

// What `holdfast checkpoint` says of one.
struct GenerationReport {
  GenerationId id;
  bool complete =
      false;  // the manifest is whole, and the folder has its parts, each with its size, and no others
  bool whole = false;               // and every byte is what was written
  bool finite = false;              // and no tensor that must be finite holds anything else
  std::vector<std::string> faults;  // one line each, capped; names already printable
  std::vector<std::string>
      strangers;            // files that are no part of a generation: not read, and no fault; printable
  std::uint64_t bytes = 0;  // of its files
  bool clean() const { return complete && whole && finite; }
};

// Looks at the manifest and at which files are there, and leaves `whole` and `finite` false.
GenerationReport inspect_generation(FileSystem& files, const std::string& checkpoints,
                                    const GenerationId& id);

// Reads all of it. O(bytes of the generation), and memory for one block.
GenerationReport verify_generation(FileSystem& files, const std::string& checkpoints, const GenerationId& id);

}  // namespace holdfast
