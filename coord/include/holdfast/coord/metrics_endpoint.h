// An HTTP endpoint for Prometheus to scrape.
#pragma once

#include <memory>
#include <string>

#include "holdfast/collectives/status.h"
#include "holdfast/coord/metrics.h"

namespace holdfast {

// Serves GET /metrics from a thread of its own, of the lowest priority, which reads the metrics without a
// lock: a scraper that stalls or floods does not delay a step. A connection is closed after a few seconds,
// whatever it is at, and so are those that are too many.
class MetricsEndpoint {
 public:
  // Local. `address`: numeric, IPv4 or IPv6. Port 0 takes a free one. USAGE when the port cannot be had.
  // `metrics` must outlive the endpoint.
  static Status create(const std::string& address, int port, const RunMetrics& metrics,
                       std::unique_ptr<MetricsEndpoint>* out);
  ~MetricsEndpoint();

  const std::string& url() const { return url_; }  // "http://127.0.0.1:9187/metrics"

 private:
  class Server;
  MetricsEndpoint(std::unique_ptr<Server> server, std::string url);
  const std::unique_ptr<Server> server_;
  const std::string url_;
};

}  // namespace holdfast
