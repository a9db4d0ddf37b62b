#include "retention.h"

#include <fmt/format.h>

#include <algorithm>

namespace holdfast {
namespace {

std::uint64_t total(std::span<const StoredGeneration> stored) {
  std::uint64_t bytes = 0;
  for (const StoredGeneration& generation : stored) bytes += generation.bytes;
  return bytes;
}

}  // namespace

std::string quota_refusal(std::span<const StoredGeneration> stored, std::uint64_t bytes,
                          const CheckpointOptions& options) {
  const std::uint64_t older = stored.empty() ? 0 : stored.back().bytes;
  if (options.quota_bytes == 0 || (bytes <= options.quota_bytes && older <= options.quota_bytes - bytes))
    return "";
  if (stored.empty()) {
    return fmt::format("its {} bytes are more than the quota of {}", bytes, options.quota_bytes);
  }
  return fmt::format(
      "its {} bytes and the {} of {}, which stays until a newer one is on disk, are more than the quota "
      "of {}",
      bytes, older, stored.back().id.name(), options.quota_bytes);
}

bool is_kept_for_good(const GenerationId& id, const CheckpointOptions& options) {
  if (options.keep_every == 0) return false;
  const std::uint64_t interval = std::max<std::uint64_t>(1, options.interval_attempts);
  return id.attempt / interval % options.keep_every == 0;
}

std::vector<GenerationId> generations_to_remove(std::span<const StoredGeneration> stored,
                                                const CheckpointOptions& options) {
  const std::size_t keep = std::max<std::size_t>(1, static_cast<std::size_t>(options.keep));
  std::vector<GenerationId> removed;
  std::vector<StoredGeneration> kept;
  for (std::size_t i = 0; i < stored.size(); ++i) {
    const bool stays = stored.size() - i <= keep || is_kept_for_good(stored[i].id, options);
    if (stays) {
      kept.push_back(stored[i]);
    } else {
      removed.push_back(stored[i].id);
    }
  }
  std::uint64_t bytes = total(kept);
  for (std::size_t i = 0; options.quota_bytes > 0 && bytes > options.quota_bytes && i + 2 < kept.size();
       ++i) {
    bytes -= kept[i].bytes;
    removed.push_back(kept[i].id);
  }
  std::ranges::sort(removed);
  return removed;
}

}  // namespace holdfast
