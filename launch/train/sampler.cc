#include "train/sampler.h"

#include <algorithm>
#include <cassert>
#include <numeric>
#include <string>
#include <utility>

namespace holdfast::train {
namespace {

// SplitMix64's finaliser: a bijection of 64-bit integers with good avalanche.
std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// Keeps the permutations' keys apart from the random numbers' keys of the same seed.
constexpr std::uint64_t kPermutationDomain = 0x7065726d75746174u;

}  // namespace

std::uint64_t rng_key(std::uint64_t seed, int rank, std::uint64_t attempt, int micro) {
  std::uint64_t key = mix(seed);
  key = mix(key ^ static_cast<std::uint64_t>(rank));
  key = mix(key ^ attempt);
  return mix(key ^ static_cast<std::uint64_t>(micro));
}

Status check_sampler(std::int64_t dataset_size, int world_size, std::int64_t batch, int micro_batches) {
  const std::pair<const char*, std::int64_t> numbers[] = {{"data set size", dataset_size},
                                                          {"ranks", world_size},
                                                          {"batch", batch},
                                                          {"micro-batches", micro_batches}};
  for (const auto& [name, number] : numbers) {
    if (number < 1)
      return Status::usage(std::string(name) + ": " + std::to_string(number) + ", must be at least 1");
  }
  if (dataset_size < world_size) {
    return Status::usage("data set of " + std::to_string(dataset_size) + " samples is too small for " +
                         std::to_string(world_size) + " ranks: each needs at least one");
  }
  return Status();
}

Sampler::Sampler(std::uint64_t seed, std::int64_t dataset_size, int rank, int world_size, std::int64_t batch,
                 int micro_batches)
    : seed_(seed),
      dataset_size_(dataset_size),
      rank_(rank),
      shard_(static_cast<std::uint64_t>(dataset_size / world_size)),
      batch_(batch),
      micro_batches_(micro_batches) {
  assert(check_sampler(dataset_size, world_size, batch, micro_batches).ok());
  assert(rank >= 0 && rank < world_size);
}

void Sampler::batch(std::uint64_t attempt, int micro, std::vector<std::int64_t>* sample_ids) {
  assert(micro >= 0 && micro < micro_batches_);
  const auto micro_batches = static_cast<std::uint64_t>(micro_batches_);
  const auto size = static_cast<std::uint64_t>(batch_);
  const std::uint64_t first = (attempt * micro_batches + static_cast<std::uint64_t>(micro)) * size;
  const std::uint64_t shard_begin = static_cast<std::uint64_t>(rank_) * shard_;

  sample_ids->resize(size);
  for (std::uint64_t i = 0; i < size; ++i) {
    const std::uint64_t position = first + i;
    permute(position / shard_);
    (*sample_ids)[i] = permutation_[shard_begin + position % shard_];
  }
}

void Sampler::permute(std::uint64_t pass) {
  if (pass == pass_ && !permutation_.empty()) return;
  permutation_.resize(static_cast<std::size_t>(dataset_size_));
  std::iota(permutation_.begin(), permutation_.end(), 0);
  // Fisher-Yates, written out because std::shuffle may differ between standard libraries. The modulo's bias
  // is below dataset_size / 2^64.
  const std::uint64_t key = mix(mix(seed_ ^ kPermutationDomain) ^ pass);
  for (std::size_t i = permutation_.size(); i > 1; --i) {
    std::swap(permutation_[i - 1], permutation_[mix(key ^ i) % i]);
  }
  pass_ = pass;
}

}  // namespace holdfast::train
