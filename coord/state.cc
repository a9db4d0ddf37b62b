#include "holdfast/coord/state.h"

#include <fmt/format.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <optional>
#include <string_view>

#include "durable_file.h"
#include "holdfast/collectives/record.h"
#include "holdfast/coord/printable.h"
#include "holdfast/coord/state.pb.h"

namespace holdfast {
namespace {

// Thousands of remembered skips with the longest of names fit; what is larger was not written by us.
constexpr std::size_t kLargestState = 64 << 20;

bool skips_are_sound(const google::protobuf::RepeatedPtrField<SkipMessage>& skips) {
  return std::ranges::all_of(skips, [](const SkipMessage& skip) {
    return !skip.has_stage() || (skip.stage() >= 0 && skip.stage() < kStageCount);
  });
}

// Numbers that are used without another look.
bool is_sound(const RunState& state) {
  const double scale = state.loss_scale().scale();
  return skips_are_sound(state.recent_skips()) && skips_are_sound(state.pending_skips()) &&
         (!state.has_loss_scale() || (std::isfinite(scale) && scale > 0));
}

// Why `bytes` are not what write_state() wrote; none when they are.
std::optional<std::string> decode(const std::string& bytes, RunState* state) {
  StateFile file;
  if (!file.ParseFromString(bytes) || !file.has_version()) return "damaged";
  if (file.version() != kStateVersion) {
    return "of version " + std::to_string(file.version()) + "; this program reads version " +
           std::to_string(kStateVersion);
  }
  const XXH128_hash_t digest = XXH3_128bits(file.payload().data(), file.payload().size());
  if (digest.high64 != file.digest_high() || digest.low64 != file.digest_low()) return "damaged";
  // Bytes that Protobuf would overlook, such as fields that it does not know or that are there twice.
  file.DiscardUnknownFields();
  if (file.SerializeAsString() != bytes) return "damaged";
  if (!state->ParseFromString(file.payload()) || !is_sound(*state)) return "damaged";
  return std::nullopt;
}

std::string encode(const RunState& state) {
  StateFile file;
  file.set_version(kStateVersion);
  file.set_payload(state.SerializeAsString());
  const XXH128_hash_t digest = XXH3_128bits(file.payload().data(), file.payload().size());
  file.set_digest_high(digest.high64);
  file.set_digest_low(digest.low64);
  return file.SerializeAsString();
}

constexpr std::string_view kFreshName = "state.new.";

// Each holder has its own, so that none takes away or publishes another's.
std::string fresh_path(const std::string& run_dir, const RunState& state) {
  const std::string& holder = state.holder();
  return fmt::format("{}/{}{:016x}", run_dir, kFreshName, XXH3_64bits(holder.data(), holder.size()));
}

void remove_fresh_files(const std::string& run_dir) {
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator(run_dir, none)) {
    if (entry.path().filename().string().starts_with(kFreshName)) unlink(entry.path().c_str());
  }
}

}  // namespace

std::string state_path(const std::string& run_dir) { return run_dir + "/state"; }

Status read_state(const std::string& run_dir, RunState* state) {
  const std::string path = state_path(run_dir);
  std::string bytes;
  state->Clear();
  auto fault = read_whole(path, kLargestState, &bytes);
  if (!fault) fault = decode(bytes, state);
  if (!fault) return Status();
  state->Clear();
  return Status::usage(
      "the run's memory " + path + " cannot be used (" + *fault +
      "), so its budgets cannot be continued. Restore the file from a copy, or begin a new run "
      "in another folder");
}

namespace {

// The epoch at which its holder began: going back to a checkpoint counts the epoch up, and gives no right to
// anything.
std::uint64_t claimed_epoch(const RunState& state) {
  return state.has_claimed_epoch() ? state.claimed_epoch() : state.epoch();
}

}  // namespace

std::string taken_over_by(const std::string& run_dir, const RunState& mine) {
  RunState on_disk;
  if (!read_state(run_dir, &on_disk).ok() || on_disk.holder() == mine.holder()) return "";
  if (claimed_epoch(on_disk) < claimed_epoch(mine)) return "";
  return printable(on_disk.holder()) + ", epoch " + std::to_string(on_disk.epoch());
}

Status write_state(const std::string& run_dir, const RunState& state) {
  const auto last_look = [&]() -> Status {
    const std::string by = taken_over_by(run_dir, state);
    if (by.empty()) return Status();
    return {StatusCode::kRanksDisagree, "another run has taken over " + run_dir + " (" + by + ")"};
  };
  return replace_file(state_path(run_dir), fresh_path(run_dir, state), encode(state), last_look);
}

Status claim_state(const std::string& run_dir, const RunState& state) {
  // An earlier writer that was stopped after its last look still needs its fresh file. If it was quicker than
  // we are, what it wrote is seen here, and it has none left. One that makes a fresh file later finds our
  // state when it looks.
  constexpr int kMostTries = 8;
  for (int i = 0; i < kMostTries; ++i) {
    if (Status s = write_state(run_dir, state); !s.ok()) return s;
    remove_fresh_files(run_dir);
    std::string bytes;
    if (!read_whole(state_path(run_dir), kLargestState, &bytes) && bytes == encode(state)) return Status();
  }
  return Status::internal("cannot write " + state_path(run_dir) + ": another writer is in the way");
}

}  // namespace holdfast
