#include "train/digest.h"

#include <fmt/format.h>
#include <xxhash.h>

namespace holdfast::train {
namespace {
XXH3_state_t* xxh(void* state) { return static_cast<XXH3_state_t*>(state); }
}  // namespace

Digest::Digest() : state_(XXH3_createState()) { XXH3_128bits_reset(xxh(state_)); }
Digest::~Digest() { XXH3_freeState(xxh(state_)); }

void Digest::add(const void* data, std::size_t bytes) { XXH3_128bits_update(xxh(state_), data, bytes); }

std::string Digest::hex() const {
  const XXH128_hash_t hash = XXH3_128bits_digest(xxh(state_));
  return fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
}

}  // namespace holdfast::train
