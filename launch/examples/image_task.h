// What nccl_train.cu and nccl_minimal.cu are told and what they learn from: options, images, and a digest to
// compare runs by. No CUDA. With -DHOLDFAST_WITHOUT_LIBRARIES it needs neither zlib nor xxHash: made-up data
// only, a simpler digest.
#pragma once

#include <charconv>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "holdfast/collectives/status.h"
#include "train/idx_dataset.h"
#include "train/sampler.h"

#ifndef HOLDFAST_WITHOUT_LIBRARIES
#include <xxhash.h>
#endif

namespace holdfast::example {

// ---- options

constexpr const char* kUsage =
    "nccl_train [--data FOLDER] [--run-dir FOLDER] [--steps N] [--batch N] [--hidden N] [--rate R]\n"
    "           [--inject-nan ATTEMPT:RANK] [--omit-update ATTEMPT]\n"
    "--data         Fashion-MNIST or MNIST in IDX files; made-up data otherwise\n"
    "--steps        attempts; one pass over the data otherwise\n"
    "--batch        samples of each rank in an attempt (64)\n"
    "--inject-nan   a NaN in a gradient of that rank, in that attempt\n"
    "--omit-update  leaves out that attempt's update: what a skip must come to, bit for bit\n";

struct Options {
  std::string data;
  std::string run_dir;
  std::uint64_t steps = 0;
  int batch = 64;
  int hidden = 256;
  float rate = 1e-3f;
  std::optional<std::uint64_t> inject_at;
  int inject_rank = 0;
  std::optional<std::uint64_t> omit_update;
};

template <class Number>
bool parse(std::string_view text, Number* number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *number);
  return error == std::errc() && end == text.data() + text.size();
}

inline bool parse(int argc, char** argv, Options* options) {
  for (int i = 1; i < argc; i += 2) {
    const std::string_view name = argv[i];
    if (i + 1 == argc) return false;
    const std::string_view value = argv[i + 1];
    std::uint64_t attempt = 0;
    bool good = true;
    if (name == "--data") {
      options->data = value;
    } else if (name == "--run-dir") {
      options->run_dir = value;
    } else if (name == "--steps") {
      good = parse(value, &options->steps);
    } else if (name == "--batch") {
      good = parse(value, &options->batch) && options->batch > 0 && options->batch <= 1 << 16;
    } else if (name == "--hidden") {
      good = parse(value, &options->hidden) && options->hidden > 0 && options->hidden <= 1 << 14 &&
             options->hidden % 4 == 0;
    } else if (name == "--rate") {
      good = parse(value, &options->rate);
    } else if (name == "--inject-nan") {
      const std::size_t colon = value.find(':');
      good = colon != value.npos && parse(value.substr(0, colon), &attempt) &&
             parse(value.substr(colon + 1), &options->inject_rank);
      options->inject_at = attempt;
    } else if (name == "--omit-update") {
      good = parse(value, &attempt);
      options->omit_update = attempt;
    } else {
      good = false;
    }
    if (!good) return false;
  }
  return true;
}

// ---- data

// Ten pictures of noise, and samples that are mostly other noise.
inline train::ImageDataset make_up(std::int64_t count, std::uint64_t seed) {
  constexpr std::int64_t kSide = 28;
  std::mt19937 pictures(7);
  std::vector<std::uint8_t> of_class(10 * kSide * kSide);
  for (std::uint8_t& pixel : of_class) pixel = static_cast<std::uint8_t>(pictures() % 256);
  std::mt19937_64 random(seed);
  train::ImageDataset made{.count = count, .rows = kSide, .cols = kSide, .pixels = {}, .labels = {}};
  for (std::int64_t i = 0; i < count; ++i) {
    made.labels.push_back(static_cast<std::uint8_t>(random() % 10));
    const std::uint8_t* picture = &of_class[made.labels.back() * std::size_t{kSide * kSide}];
    for (int p = 0; p < kSide * kSide; ++p) {
      made.pixels.push_back(static_cast<std::uint8_t>((picture[p] + 3 * (random() % 256)) / 4));
    }
  }
  return made;
}

struct Data {
  train::ImageDataset training;
  train::ImageDataset test;
};

inline Status load(const std::string& folder, Data* data) {
  if (folder.empty()) {
    *data = {make_up(12'800, 1), make_up(1'024, 2)};
    return Status();
  }
#ifdef HOLDFAST_WITHOUT_LIBRARIES
  return Status::usage("--data " + folder + ": this program was built without zlib, and reads no data");
#else
  Status status = train::load_idx(folder, "train", 10, &data->training);
  if (status.ok()) status = train::load_idx(folder, "t10k", 10, &data->test);
  if (status.ok() && data->training.rows * data->training.cols != data->test.rows * data->test.cols) {
    status = Status::usage(folder + ": training and test images differ in size");
  }
  return status;
#endif
}

inline std::string digest(const std::vector<float>& values) {
  char text[33] = "";
#ifdef HOLDFAST_WITHOUT_LIBRARIES
  std::uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a
  std::vector<unsigned char> bytes(values.size() * sizeof(float));
  std::memcpy(bytes.data(), values.data(), bytes.size());
  for (const unsigned char byte : bytes) hash = (hash ^ byte) * 0x100000001b3u;
  std::snprintf(text, sizeof(text), "%016llx", static_cast<unsigned long long>(hash));
#else
  const XXH128_hash_t hash = XXH3_128bits(values.data(), values.size() * sizeof(float));
  std::snprintf(text, sizeof(text), "%016llx%016llx", static_cast<unsigned long long>(hash.high64),
                static_cast<unsigned long long>(hash.low64));
#endif
  return text;
}

// Loads the data, and completes the options by what they say.
inline Status prepare(Options* options, int size, Data* data) {
  Status status = load(options->data, data);
  if (status.ok()) status = train::check_sampler(data->training.count, size, options->batch, 1);
  if (status.ok() && options->steps == 0) {
    options->steps = static_cast<std::uint64_t>(data->training.count / size / options->batch);
  }
  return status;
}

}  // namespace holdfast::example
