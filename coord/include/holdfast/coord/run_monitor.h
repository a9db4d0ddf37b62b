// What others see of a live run, and may ask of it, through files of its folder.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "holdfast/collectives/topology.h"
#include "holdfast/collectives/watchdog.h"
#include "holdfast/coord/metrics.h"

namespace holdfast {

class RunState;

// A thread of rank 0 that once a second replaces RUN_DIR/metrics.prom and RUN_DIR/status.json and looks
// whether somebody has put a request to stop into RUN_DIR/stop, or another run has taken the folder over. So
// none of that is done by the training thread. These files are no evidence: nothing is synced, a failure is
// said once and changes nothing, and what a run that was taken over finds there it leaves alone.
class RunMonitor {
 public:
  explicit RunMonitor(const RunMetrics& metrics);  // which must outlive it
  ~RunMonitor();
  RunMonitor(const RunMonitor&) = delete;
  RunMonitor& operator=(const RunMonitor&) = delete;

  // ---- the training thread
  // Once. Writes the files and starts the thread. `state`: of which epoch and holder this run is.
  void start(const std::string& run_dir, const RunState& state, const Topology& topology);

  // Ends the thread and writes the files once more; with the exit code when the run has ended in order.
  void finish(std::optional<int> exit_code);

  // Whether somebody asked the run to stop. A relaxed load.
  bool stop_requested() const { return stop_requested_.load(std::memory_order_relaxed); }
  std::string stop_requested_by() const;

  // Whether another run has taken the folder over, and who: as of the last look. A relaxed load; stays so.
  bool taken_over() const { return taken_over_.load(std::memory_order_relaxed); }
  std::string taken_over_by() const;

  // ---- any thread
  // Where the ranks are, as far as rank 0 has heard.
  void heard(std::vector<RankReport> reports);

 private:
  void watch();
  void write(std::optional<int> exit_code);
  std::string status_text(std::optional<int> exit_code);
  void look_for_stop();
  bool look_for_takeover();

  const RunMetrics& metrics_;
  std::string run_dir_;  // "" until started
  std::unique_ptr<const RunState> mine_;
  std::atomic<bool> stop_requested_{false};
  std::atomic<bool> taken_over_{false};

  mutable std::mutex mutex_;  // of all below
  std::condition_variable wake_;
  bool finished_ = false;
  std::string stop_requested_by_;
  std::string taken_over_by_;
  std::vector<RankReport> reports_;
  double heard_at_ = 0;  // seconds of the steady clock

  // Of whoever writes: the thread while it runs.
  bool write_failed_ = false;  // said on stderr
  std::uint64_t attempts_before_ = 0;
  double written_at_ = 0;       // seconds of the steady clock
  std::optional<double> rate_;  // attempts a second

  std::thread thread_;
};

}  // namespace holdfast
