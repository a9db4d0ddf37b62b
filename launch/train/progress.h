// The progress of a training run, for whoever watches it: one line that is rewritten on a terminal, plain
// lines in a log.
#pragma once

#include <cstdint>
#include <cstdio>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace holdfast::train {

// What a progress line shows.
struct ProgressView {
  std::uint64_t done = 0;   // attempts
  std::uint64_t total = 0;  // attempts of the run
  std::uint64_t updates = 0;
  std::uint64_t skips = 0;
  double loss = 0.0;  // NaN and infinities are shown as they are
  double gradient_norm = 0.0;
  double attempts_per_second = 0.0;  // 0 when not known yet
};

// "attempt 120/600  loss 0.4321  grad norm 1.234  skips 2  0:05 left  98.3/s  updates 118"; fields that do
// not fit `max_width` columns are left out from the end, 0 for no limit. ASCII, no line end.
std::string format_progress(const ProgressView& view, std::size_t max_width);

// "0:04", "12:34", "1:02:03", "3d 04:05"; "?" when it is not finite or negative.
std::string format_duration(double seconds);

// Where stdout ends up. Under mpirun a rank's stdout is a pseudo-terminal or a pipe whatever mpirun's own
// stdout is, so the latter counts. A log, for want of knowing better, when mpirun runs on another host; a
// log, too, when mpirun puts tags in front of lines, and when TERM is dumb.
struct OutputTarget {
  bool terminal = false;
  std::string device;  // the terminal, to be asked for its width; empty unless `terminal`
};
OutputTarget find_output_target();

// Rank 0 only; one thread. Writes to `out` and flushes it.
class Progress {
 public:
  enum class Mode { kAuto, kTerminal, kPlain, kOff };
  using Clock = std::function<double()>;  // seconds, never going back

  // `attempts`: of the run. kAuto is for `out` = stdout. On a terminal its width is asked for at each line,
  // and taken for 80 columns when it is not known.
  Progress(std::uint64_t attempts, Mode mode, std::FILE* out = stdout, Clock clock = steady_seconds);
  ~Progress();  // finish()
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // After each attempt; `attempt` is its number, from 0. Writes at most every 0.2 s on a terminal, every 2 s
  // otherwise.
  void report(std::uint64_t attempt, std::uint64_t updates, std::uint64_t skips, double loss,
              double gradient_norm);

  // A line of its own (given without its end), at once, in every mode but kOff. Control characters in it are
  // shown as \xNN.
  void note(std::string_view text);

  // Writes the last report if it was held back, and ends the line. Later reports start a new one.
  void finish();

  static double steady_seconds();

 private:
  void write_line(double now);
  std::size_t terminal_width() const;
  double recent_rate(double now) const;

  const std::uint64_t attempts_;
  const Clock clock_;
  std::FILE* const out_;
  bool off_ = false;
  bool terminal_ = false;
  int terminal_fd_ = -1;  // of the device that is asked for its width; -1 for out_ itself

  ProgressView latest_;
  bool held_back_ = false;                               // latest_ has not been written
  bool line_open_ = false;                               // the terminal's cursor is on a progress line
  std::optional<double> last_write_;                     // time
  double started_ = 0.0;                                 // time
  std::deque<std::pair<double, std::uint64_t>> window_;  // time, attempts done by then; oldest first
};

}  // namespace holdfast::train
