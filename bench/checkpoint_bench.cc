// What the scan and the digests add to the write of a checkpoint, and what a checkpoint adds to the step that
// it is taken at. What was written is restored and compared.
//
//   checkpoint_bench [FOLDER]     on the file system of FOLDER, by default the current folder
#include <fmt/format.h>
#include <stdlib.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "holdfast/checkpoint/checkpoint_store.h"
#include "holdfast/checkpoint/manifest.pb.h"
#include "holdfast/collectives/thread_collective.h"
#include "holdfast/coord/storage/publication.h"
#include "paired.h"
#include "require.h"
#include "part_file.h"

namespace {

using namespace holdfast;
using namespace holdfast::bench;

constexpr std::int64_t kTensors = 64;
constexpr std::int64_t kElements = std::int64_t{1} << 20;  // of each: 256 MiB in all
constexpr int kRounds = 15;

// Normal values, as weights and moments are.
struct Model {
  Model() {
    std::mt19937 random(1);
    std::normal_distribution<float> normal(0.0f, 0.02f);
    std::vector<float> values(static_cast<std::size_t>(kElements));
    for (float& value : values) value = normal(random);
    for (std::int64_t t = 0; t < kTensors; ++t) {
      values[0] = static_cast<float>(t);  // no two are the same
      tensors.push_back(values);
    }
    for (std::int64_t t = 0; t < kTensors; ++t) {
      StateTensor tensor;
      tensor.name = fmt::format("layer{}.weight", t);
      tensor.data = tensors[static_cast<std::size_t>(t)].data();
      tensor.shape = {kElements};
      state.add(tensor);
    }
  }
  std::vector<std::vector<float>> tensors;
  TrainingState state;
};

// ---- the write

std::vector<PartTensor> parts_of(const TrainingState& state) {
  std::vector<PartTensor> parts;
  for (const StateTensor& tensor : state.tensors()) parts.push_back(PartTensor::of(tensor, tensor.data));
  return parts;
}

// A generation as rank 0 makes it.
void write_checked(const std::string& folder, const std::string& name, const std::vector<PartTensor>& tensors,
                   Manifest* manifest) {
  FileSystem& files = real_file_system();
  require(begin_publication(files, folder, name));
  std::optional<NonFinite> finding;
  manifest->clear_parts();
  require(write_part(files, partial_path(folder, name), -1, tensors, manifest->add_parts(), &finding));
  require(write_synced(files, partial_path(folder, name) + "/manifest.pb", encode_manifest(*manifest)));
  require(publish(files, folder, name));
}

// The same bytes by the same calls, and nobody looks at them.
void write_plain(const std::string& folder, const std::string& name, const std::string& header,
                 const std::vector<PartTensor>& tensors, const std::string& manifest) {
  constexpr std::size_t kBlock = std::size_t{1} << 20;  // as in part_file.cc
  FileSystem& files = real_file_system();
  require(begin_publication(files, folder, name));
  std::unique_ptr<WritableFile> file;
  require(files.create_file(partial_path(folder, name) + "/replicated.safetensors", &file));
  require(file->append(header));
  for (const PartTensor& tensor : tensors) {
    const std::string_view bytes(static_cast<const char*>(tensor.data),
                                 static_cast<std::size_t>(kElements) * 4);
    for (std::size_t at = 0; at < bytes.size(); at += kBlock) require(file->append(bytes.substr(at, kBlock)));
  }
  require(file->sync());
  require(file->close());
  require(write_synced(files, partial_path(folder, name) + "/manifest.pb", manifest));
  require(publish(files, folder, name));
}

void bench_write(const std::string& folder, const Model& model) {
  FileSystem& files = real_file_system();
  const std::vector<PartTensor> tensors = parts_of(model.state);
  Manifest manifest;
  const GenerationId id{1, 1};
  manifest.set_epoch(id.epoch);
  manifest.set_attempt(id.attempt);
  manifest.set_update(1);
  manifest.set_skips(0);
  manifest.set_ranks(1);
  const auto remove = [&] { require(remove_tree(files, generation_path(folder, id))); };

  write_checked(folder, id.name(), tensors, &manifest);
  std::unique_ptr<ReadableFile> part;
  require(files.open_file(generation_path(folder, id) + "/replicated.safetensors", &part));
  std::string header;
  SafetensorsHeader parsed;
  require(read_safetensors_header(*part, &parsed, &header));
  remove();

  const std::string encoded = encode_manifest(manifest);
  const auto plain = [&] {
    const double took = seconds([&] { write_plain(folder, id.name(), header, tensors, encoded); });
    // The same bytes indeed: so it is a generation, too.
    require(inspect_generation(files, folder, id).faults.empty(), "the plain write is another");
    remove();
    return took;
  };
  const auto checked = [&] {
    const double took = seconds([&] { write_checked(folder, id.name(), tensors, &manifest); });
    require(encode_manifest(manifest) == encoded, "the checkpoint is another");
    require(inspect_generation(files, folder, id).faults.empty(), "the checkpoint is damaged");
    remove();
    return took;
  };
  const Ratios ratios = paired(plain, checked, kRounds);
  fmt::print("speed plain_write={:.2f} GB/s\n",
             static_cast<double>(kTensors * kElements * 4) / ratios.base_seconds * 1e-9);
  print_ratio("checkpoint_over_plain_write", ratios);

  write_checked(folder, id.name(), tensors, &manifest);
  require(verify_generation(files, folder, id).clean(), "the checkpoint is not clean");
  remove();
}

// ---- the hold-up

void bench_save(const std::string& folder, Model& model) {
  ThreadGroup(1).run([&](Collective& collective) {
    std::unique_ptr<CheckpointStore> store;
    require(CheckpointStore::create(collective, real_file_system(), folder,
                                    {.interval_attempts = 1, .keep = 1}, model.state, &store));
    std::vector<std::vector<float>> copy = model.tensors;
    std::uint64_t attempt = 0;
    const auto plain = [&] {
      return seconds([&] {
        for (std::size_t t = 0; t < copy.size(); ++t) {
          std::memcpy(copy[t].data(), model.tensors[t].data(), copy[t].size() * sizeof(float));
        }
      });
    };
    const auto save = [&] {
      ++attempt;
      const double took = seconds([&] { store->save({1, attempt, attempt, 0}, ""); });
      require(store->complete());
      store->wait();
      const std::vector<CheckpointOutcome> outcomes = store->take_outcomes();
      require(outcomes.size() == 1 && outcomes[0].published, "a checkpoint was not published");
      return took;
    };
    const Ratios ratios = paired(plain, save, kRounds);
    fmt::print("speed copy={:.2f} GB/s\n",
               static_cast<double>(kTensors * kElements * 4) / ratios.base_seconds * 1e-9);
    print_ratio("save_over_copy", ratios);

    const std::vector<std::vector<float>> wanted = model.tensors;
    for (std::vector<float>& tensor : model.tensors) std::ranges::fill(tensor, 1.0f);
    RestoredGeneration restored;
    require(store->restore(&restored));
    require(restored.position.attempt == attempt && model.tensors == wanted, "what is restored is another");
  });
}

}  // namespace

int main(int argc, char** argv) {
  std::string folder = std::string(argc > 1 ? argv[1] : ".") + "/checkpoint_bench_XXXXXX";
  require(mkdtemp(folder.data()) != nullptr, "cannot make " + folder);
  Model model;
  bench_write(folder, model);
  bench_save(folder, model);
  std::error_code ignored;
  std::filesystem::remove_all(folder, ignored);
  return 0;
}
