// A small generation on disk, with everything in it that one can have.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/part_file.h"
#include "coord/temp_dir.h"
#include "holdfast/checkpoint/generation.h"
#include "holdfast/checkpoint/manifest.pb.h"
#include "holdfast/coord/storage/publication.h"

namespace holdfast {

struct SampleGeneration {
  GenerationId id{.epoch = 1, .attempt = 600};
  std::vector<float> weight = {1.0f, -2.5f, 3e38f};
  std::vector<double> moment = {0.5, -0.25};
  std::vector<float> mask = {0.0f, -INFINITY};  // infinite by design
  std::string cursor = "cursor\x01";

  std::vector<PartTensor> replicated() const {
    return {{.name = "conv1.weight", .data = weight.data(), .dtype = DType::kFloat32, .shape = {3, 1}},
            {.name = "mask",
             .data = mask.data(),
             .dtype = DType::kFloat32,
             .shape = {2},
             .must_be_finite = false}};
  }
  std::vector<PartTensor> of_rank(int rank) const {
    return {PartTensor::of_bytes("loader", cursor),
            {.name = "moment",
             .data = moment.data(),
             .dtype = DType::kFloat64,
             .shape = {2},
             .sharded = true,
             .shard_offset = 2 * rank,
             .shard_total = 4}};
  }

  // Of two ranks, and written as a run does.
  void write(const std::string& checkpoints) const {
    FileSystem& files = real_file_system();
    ASSERT_TRUE(files.create_folder(checkpoints).ok());
    ASSERT_TRUE(begin_publication(files, checkpoints, id.name()).ok());
    const std::string folder = partial_path(checkpoints, id.name());
    Manifest manifest;
    manifest.set_epoch(id.epoch);
    manifest.set_attempt(id.attempt);
    manifest.set_update(590);
    manifest.set_skips(10);
    manifest.set_ranks(2);
    manifest.set_time("2026-11-29T16:23:27.622Z");
    manifest.set_memory("memory\xff");
    manifest.set_version("0.1.0");
    std::optional<NonFinite> finding;
    for (const int rank : {-1, 0, 1}) {
      const std::vector<PartTensor> tensors = rank < 0 ? replicated() : of_rank(rank);
      const Status status = write_part(files, folder, rank, tensors, manifest.add_parts(), &finding);
      ASSERT_TRUE(status.ok()) << status.message();
    }
    ASSERT_TRUE(
        write_synced(files, folder + "/" + std::string(kManifestName), encode_manifest(manifest)).ok());
    ASSERT_TRUE(publish(files, checkpoints, id.name()).ok());
  }
};

// The files of a folder, {name: bytes}.
inline std::map<std::string, std::string> files_of(const std::string& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    files[entry.path().filename().string()] = read_file(entry.path().string());
  }
  return files;
}

}  // namespace holdfast
