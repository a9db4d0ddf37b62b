#include "layer_log.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "holdfast/coord/event_log.h"
#include "holdfast/coord/evidence/evidence.pb.h"
#include "holdfast/coord/evidence/manifest_json.h"
#include "storage/posix_io.h"

namespace holdfast {

LayerLog::~LayerLog() { close(); }

void LayerLog::close() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

Status LayerLog::open(const std::string& path, std::uint64_t most_bytes) {
  if (Status s = drop_half_line(path); !s.ok()) return s;
  fd_ = open_log(path);
  struct stat info {};
  if (fd_ < 0 || fstat(fd_, &info) != 0)
    return Status::internal("cannot open " + path + ": " + std::strerror(errno));
  const auto size = static_cast<std::uint64_t>(info.st_size);
  bytes_left_ = most_bytes > size ? most_bytes - size : 0;
  return Status();
}

Status LayerLog::append(const LayerAttempt& attempt) {
  if (closed()) return Status::internal("it is closed");
  const std::string line =
      layers_json(attempt).dump(-1, ' ', true, nlohmann::ordered_json::error_handler_t::replace) + "\n";
  if (line.size() > bytes_left_) {
    close();
    return Status::internal("it is as large as it may be");
  }
  if (!write_all(fd_, line)) {
    const Status failed = Status::internal(std::strerror(errno));
    close();
    return failed;
  }
  bytes_left_ -= line.size();
  return Status();
}

}  // namespace holdfast
