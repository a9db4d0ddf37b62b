// RUN_DIR/layers.jsonl: one strict JSON object a line, an attempt each, of rank 0.
#pragma once

#include <cstdint>
#include <string>

#include "holdfast/collectives/status.h"

namespace holdfast {

class LayerAttempt;

// Appends, and does not wait for the disk: what a crash takes away is a few attempts of a trend. Not
// thread-safe.
class LayerLog {
 public:
  LayerLog() = default;
  ~LayerLog();
  LayerLog(const LayerLog&) = delete;
  LayerLog& operator=(const LayerLog&) = delete;

  // Creates `path` (mode 0600) or goes on at its end; it grows to `most_bytes`.
  Status open(const std::string& path, std::uint64_t most_bytes);
  // INTERNAL, and nothing more is written, once there is no room or writing has failed.
  Status append(const LayerAttempt& attempt);
  bool closed() const { return fd_ < 0; }

 private:
  void close();

  int fd_ = -1;
  std::uint64_t bytes_left_ = 0;
};

}  // namespace holdfast
