// RUN_DIR/events.jsonl: one strict JSON object a line.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "holdfast/collectives/status.h"

namespace holdfast {

// JSON has no number for NaN and the infinities: they are the strings "nan", "inf" and "-inf", so that any
// strict parser accepts the log and the three stay distinguishable.
nlohmann::ordered_json json_number(double value);

// Seconds since 1970 as UTC, "2026-01-31T23:59:59.123Z"; now without argument.
std::string utc_time();

// Takes away what a crash may have left of a line at the end, which would spoil the next one. No rank was
// told of what such a line was to say. For who holds the run folder.
Status drop_half_line(const std::string& path);

// Appends events to a file. Each line is written whole or not at all, and is on disk when append() returns.
// Not thread-safe.
class EventLog {
 public:
  EventLog() = default;
  ~EventLog();
  EventLog(const EventLog&) = delete;
  EventLog& operator=(const EventLog&) = delete;

  // Creates `path` (mode 0600) or goes on at its end. INTERNAL, with the reason, on failure,
  // and for what is no regular file; append() then fails for that reason.
  Status open(const std::string& path);

  // Writes {"event": name, "time": now, ...fields}. A failure leaves the file as it was before the call, is
  // reported on stderr the first time, and is counted; it never changes what the job does.
  Status append(const std::string& name, const nlohmann::ordered_json& fields);

  std::uint64_t lost_events() const { return lost_events_; }

 private:
  std::string path_;
  std::string why_closed_ = "it was not opened";
  int fd_ = -1;
  std::uint64_t lost_events_ = 0;
};

}  // namespace holdfast
