// RUN_DIR/stop: somebody asks the live run to stop.
#pragma once

#include <optional>
#include <string>

#include "holdfast/collectives/status.h"

namespace holdfast {

struct StopRequest {
  std::string holder;  // which run is asked, see RunFolder::holder()
  std::string by;      // who asks
};

std::string stop_request_path(const std::string& run_dir);

// For any process that may write into the folder. INTERNAL, with the reason, on failure.
Status write_stop_request(const std::string& run_dir, const StopRequest& request);

// Takes the request away, if there is one. For who holds the run folder. Local; one system call when there is
// none.
std::optional<StopRequest> take_stop_request(const std::string& run_dir);

}  // namespace holdfast
