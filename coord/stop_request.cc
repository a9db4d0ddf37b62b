#include "holdfast/coord/stop_request.h"

#include <unistd.h>

#include "durable_file.h"

namespace holdfast {

std::string stop_request_path(const std::string& run_dir) { return run_dir + "/stop"; }

// Two lines: the holder, and who asks.
Status write_stop_request(const std::string& run_dir, const StopRequest& request) {
  return replace_file_unsynced(stop_request_path(run_dir), request.holder + "\n" + request.by + "\n");
}

std::optional<StopRequest> take_stop_request(const std::string& run_dir) {
  constexpr std::size_t kMostBytes = 4096;
  const std::string path = stop_request_path(run_dir);
  if (access(path.c_str(), F_OK) != 0) return std::nullopt;
  std::string bytes;
  const auto fault = read_whole(path, kMostBytes, &bytes);
  unlink(path.c_str());
  const std::size_t end = bytes.find('\n');
  if (fault || end == std::string::npos) return std::nullopt;
  const std::string rest = bytes.substr(end + 1);
  return StopRequest{bytes.substr(0, end), rest.substr(0, rest.find('\n'))};
}

}  // namespace holdfast
