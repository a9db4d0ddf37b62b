// RUN_DIR: what rank 0 keeps of one run.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "holdfast/collectives/status.h"

namespace holdfast {

// Whether `holder`, as RunFolder::holder() gives it, is of that process.
bool is_holder(const std::string& holder, std::string_view host, std::int64_t pid);

// A folder that belongs to one live run. Held by rank 0 from start to end.
class RunFolder {
 public:
  RunFolder() = default;
  ~RunFolder();  // gives the lock back
  RunFolder(const RunFolder&) = delete;
  RunFolder& operator=(const RunFolder&) = delete;

  // Makes `path` (mode 0700, with its parents) and locks it. USAGE when another live run holds it, naming
  // that run's host and process; when it holds the record of an earlier run; or when it cannot be made.
  Status create(const std::string& path);

  // Locks the folder of an earlier run, as it is. USAGE when there is none or a live run holds it.
  Status open(const std::string& path);

  // Whether a run has left a record in `path`: its events or its memory.
  static bool holds_record(const std::string& path);

  // Who holds the folder of a live run, as its lock says; none when no run holds it. Looks, and changes
  // nothing. For a moment after a run has locked the folder the lock says "", or still names an earlier
  // holder: who acts on it looks again a little later.
  static std::optional<std::string> live_holder(const std::string& path);

  // This holder, among all there ever were: host, process and a random number. "" before the lock is had.
  const std::string& holder() const { return holder_; }

  const std::string& path() const { return path_; }
  std::string layers_path() const { return path_ + "/layers.jsonl"; }
  std::string ledger_path() const { return path_ + "/dropped.jsonl"; }
  std::string events_path() const { return path_ + "/events.jsonl"; }

 private:
  Status lock(const std::string& path);
  Status take();

  std::string path_;
  std::string holder_;
  int lock_fd_ = -1;
};

}  // namespace holdfast
