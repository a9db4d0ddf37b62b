#include "holdfast/coord/event_log.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <ctime>

#include "holdfast/coord/printable.h"
#include "storage/posix_io.h"

namespace holdfast {

nlohmann::ordered_json json_number(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  return value;
}

std::string utc_time() {
  using namespace std::chrono;
  const auto now = system_clock::now();
  const auto millis = duration_cast<milliseconds>(now.time_since_epoch()).count() % 1000;
  const std::time_t seconds = system_clock::to_time_t(now);
  std::tm utc{};
  gmtime_r(&seconds, &utc);
  char date[32];
  std::strftime(date, sizeof(date), "%Y-%m-%dT%H:%M:%S", &utc);
  char text[48];
  std::snprintf(text, sizeof(text), "%s.%03dZ", date, static_cast<int>(millis));
  return text;
}

Status drop_half_line(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return errno == ENOENT ? Status() : Status::internal(path + ": " + std::strerror(errno));
  const off_t size = lseek(fd, 0, SEEK_END);
  off_t end = size;
  char byte = '\n';
  while (end > 0 && pread(fd, &byte, 1, end - 1) == 1 && byte != '\n') --end;
  const bool whole = size >= 0 && (end == 0 || byte == '\n') && (end == size || ftruncate(fd, end) == 0);
  const std::string why = std::strerror(errno);
  close(fd);
  return whole ? Status() : Status::internal("cannot mend " + path + ": " + why);
}

EventLog::~EventLog() {
  if (fd_ >= 0) close(fd_);
}

Status EventLog::open(const std::string& path) {
  path_ = path;
  fd_ = open_log(path);
  if (fd_ >= 0) return Status();
  why_closed_ = errno == ENXIO ? "not a file" : std::strerror(errno);
  return Status::internal("cannot open " + path + ": " + why_closed_);
}

Status EventLog::append(const std::string& name, const nlohmann::ordered_json& fields) {
  nlohmann::ordered_json event = {{"event", name}, {"time", utc_time()}};
  event.update(fields);
  // Names come from the trainer and may hold any bytes: what is not UTF-8 is shown as U+FFFD.
  const std::string line = event.dump(-1, ' ', true, nlohmann::ordered_json::error_handler_t::replace) + "\n";

  const off_t before = lseek(fd_, 0, SEEK_END);
  if (before >= 0 && write_all(fd_, line) && fdatasync(fd_) == 0) return Status();
  const std::string why = fd_ < 0 ? why_closed_ : std::strerror(errno);
  // Half a line would spoil the next one.
  if (before >= 0 && ftruncate(fd_, before) != 0) lseek(fd_, 0, SEEK_END);
  if (lost_events_++ == 0) {
    std::fprintf(stderr, "holdfast: a line could not be written to %s (%s); training goes on: %s",
                 printable(path_).c_str(), why.c_str(), line.c_str());
  }
  return Status::internal(path_ + ": " + why);
}

}  // namespace holdfast
