#include "holdfast/coord/state.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <optional>

#include "durable_file.h"
#include "holdfast/collectives/record.h"
#include "holdfast/coord/state.pb.h"

namespace holdfast {
namespace {

// Thousands of remembered skips with the longest of names fit; what is larger was not written by us.
constexpr off_t kLargestState = 64 << 20;

// The whole file, or why not.
Status read_whole(const std::string& path, std::string* bytes) {
  const auto refuse = [&](const char* why) { return Status::usage("cannot read " + path + ": " + why); };
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return refuse(std::strerror(errno));
  struct stat info = {};
  Status status;
  if (fstat(fd, &info) != 0) {
    status = refuse(std::strerror(errno));
  } else if (!S_ISREG(info.st_mode)) {
    status = refuse("not a file");
  } else if (info.st_size > kLargestState) {
    status = refuse("too large");
  }
  bytes->clear();
  char part[1 << 14];
  for (ssize_t n = 1; status.ok() && n > 0;) {
    n = read(fd, part, sizeof part);
    if (n < 0) status = refuse(std::strerror(errno));
    if (n > 0) bytes->append(part, static_cast<std::size_t>(n));
  }
  close(fd);
  return status;
}

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
    return "of version " + std::to_string(file.version()) + ", and this program reads version " +
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

}  // namespace

std::string state_path(const std::string& run_dir) { return run_dir + "/state"; }

Status read_state(const std::string& run_dir, RunState* state) {
  const std::string path = state_path(run_dir);
  std::string bytes;
  state->Clear();
  if (Status s = read_whole(path, &bytes); !s.ok()) return s;
  const auto fault = decode(bytes, state);
  if (!fault) return Status();
  state->Clear();
  return Status::usage(
      "the run's memory " + path + " is " + *fault +
      ": its budgets cannot be continued. Restore the file from a copy, or begin a new run in "
      "another folder");
}

Status write_state(const std::string& run_dir, const RunState& state) {
  StateFile file;
  file.set_version(kStateVersion);
  file.set_payload(state.SerializeAsString());
  const XXH128_hash_t digest = XXH3_128bits(file.payload().data(), file.payload().size());
  file.set_digest_high(digest.high64);
  file.set_digest_low(digest.low64);
  return replace_file(state_path(run_dir), file.SerializeAsString());
}

}  // namespace holdfast
