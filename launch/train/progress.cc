#include "train/progress.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <vector>

namespace holdfast::train {
namespace {

constexpr double kTerminalPeriod = 0.2;  // seconds between lines
constexpr double kPlainPeriod = 2.0;
constexpr double kRateWindow = 10.0;  // seconds
constexpr double kRateStep = 0.1;     // seconds between the points of the window

std::string format(const char* pattern, double value) {
  char text[64];
  std::snprintf(text, sizeof text, pattern, value);
  return text;
}

std::string format_value(double value) {
  if (std::isnan(value)) return "nan";                                // printf may write -nan
  return format(std::abs(value) < 1000.0 ? "%#.4g" : "%.4g", value);  // keeps its width while it changes
}

std::string format_rate(double rate) {
  if (!(rate > 0.0)) return "?/s";
  return format(rate >= 100.0 ? "%.0f/s" : rate >= 10.0 ? "%.1f/s" : "%.2g/s", rate);
}

bool set_in_environment(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0';
}

// The name and the parent of a process; false when it is gone.
bool read_process(const std::string& pid, std::string* name, std::string* parent) {
  std::ifstream status("/proc/" + pid + "/status");
  std::string key;
  name->clear();
  parent->clear();
  while (parent->empty() && status >> key) {
    if (key == "Name:") status >> *name;
    if (key == "PPid:") status >> *parent;
    status.ignore(4096, '\n');
  }
  return !parent->empty();
}

std::string escape_control_characters(std::string_view text) {
  std::string escaped;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f) {
      char code[8];
      std::snprintf(code, sizeof code, "\\x%02x", byte);
      escaped += code;
    } else {
      escaped += c;
    }
  }
  return escaped;
}

}  // namespace

std::string format_duration(double seconds) {
  if (!(seconds >= 0.0) || seconds > 1e12) return "?";
  const long long all = std::llround(seconds);
  const long long days = all / 86400;
  const long long hours = all / 3600 % 24;
  const long long minutes = all / 60 % 60;
  char text[64];
  if (days > 0) {
    std::snprintf(text, sizeof text, "%lldd %02lld:%02lld", days, hours, minutes);
  } else if (hours > 0) {
    std::snprintf(text, sizeof text, "%lld:%02lld:%02lld", hours, minutes, all % 60);
  } else {
    std::snprintf(text, sizeof text, "%lld:%02lld", minutes, all % 60);
  }
  return text;
}

std::string format_progress(const ProgressView& view, std::size_t max_width) {
  const double rate = view.attempts_per_second;
  std::vector<std::string> fields = {
      "attempt " + std::to_string(view.done) + "/" + std::to_string(view.total),
      "loss " + format_value(view.loss),
      "grad norm " + format_value(view.gradient_norm),
      "skips " + std::to_string(view.skips),
  };
  if (view.done < view.total) {
    const auto left = static_cast<double>(view.total - view.done);
    fields.push_back((rate > 0.0 ? format_duration(left / rate) : "?") + " left");
  }
  fields.push_back(format_rate(rate));
  fields.push_back("updates " + std::to_string(view.updates));

  std::string line;
  for (const std::string& field : fields) {
    const std::string longer = line.empty() ? field : line + "  " + field;
    if (max_width != 0 && longer.size() > max_width) return line.empty() ? field.substr(0, max_width) : line;
    line = longer;
  }
  return line;
}

OutputTarget find_output_target() {
  const char* term = std::getenv("TERM");
  if (::isatty(STDOUT_FILENO) == 0 || (term != nullptr && std::string_view(term) == "dumb")) return {};
  for (const char* name :
       {"OMPI_MCA_orte_tag_output", "OMPI_MCA_orte_timestamp_output", "OMPI_MCA_orte_xml_output"}) {
    if (set_in_environment(name)) return {};
  }

  std::string pid = std::to_string(::getppid());
  std::string name;
  std::string parent;
  while (pid != "0" && read_process(pid, &name, &parent)) {
    if (name == "orted" || name == "prted") return {};  // mpirun is on another host
    if (name == "mpirun" || name == "mpiexec" || name == "orterun" || name == "prterun") {
      const std::string device = "/proc/" + pid + "/fd/1";
      const int fd = ::open(device.c_str(), O_RDONLY | O_NOCTTY | O_NONBLOCK | O_CLOEXEC);
      const bool terminal = fd >= 0 && ::isatty(fd) == 1;
      if (fd >= 0) ::close(fd);
      return terminal ? OutputTarget{true, device} : OutputTarget{};
    }
    pid = parent;
  }
  return {true, "/proc/self/fd/1"};
}

double Progress::steady_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Progress::Progress(std::uint64_t attempts, Mode mode, std::FILE* out, Clock clock)
    : attempts_(attempts), clock_(std::move(clock)), out_(out), off_(mode == Mode::kOff), started_(clock_()) {
  if (mode != Mode::kAuto && mode != Mode::kTerminal) return;
  const OutputTarget target = find_output_target();
  terminal_ = mode == Mode::kTerminal || target.terminal;
  if (target.terminal && out == stdout) {
    terminal_fd_ = ::open(target.device.c_str(), O_RDONLY | O_NOCTTY | O_NONBLOCK | O_CLOEXEC);
  }
}

Progress::~Progress() {
  finish();
  if (terminal_fd_ >= 0) ::close(terminal_fd_);
}

void Progress::report(std::uint64_t attempt, std::uint64_t updates, std::uint64_t skips, double loss,
                      double gradient_norm) {
  if (off_) return;
  const double now = clock_();
  if (window_.empty()) window_.emplace_back(started_, attempt);
  latest_ = {attempt + 1, attempts_, updates, skips, loss, gradient_norm, 0.0};
  held_back_ = true;

  const double period = terminal_ ? kTerminalPeriod : kPlainPeriod;
  if (!last_write_ || now - *last_write_ >= period || latest_.done >= attempts_) write_line(now);

  if (now - window_.back().first >= kRateStep) window_.emplace_back(now, latest_.done);
  while (window_.size() > 1 && now - window_[1].first >= kRateWindow) window_.pop_front();
}

void Progress::note(std::string_view text) {
  if (off_) return;
  const std::string line = (line_open_ ? "\r\033[K" : "") + escape_control_characters(text) + "\n";
  std::fwrite(line.data(), 1, line.size(), out_);
  if (line_open_) write_line(clock_());
  std::fflush(out_);
}

void Progress::finish() {
  if (off_) return;
  if (held_back_) write_line(clock_());
  if (line_open_) std::fputc('\n', out_);
  line_open_ = false;
  std::fflush(out_);
}

void Progress::write_line(double now) {
  latest_.attempts_per_second = recent_rate(now);
  // One column stays free: a line that fills the last one makes some terminals wrap.
  const std::string line = terminal_ ? "\r" + format_progress(latest_, terminal_width() - 1) + "\033[K"
                                     : format_progress(latest_, 0) + "\n";
  std::fwrite(line.data(), 1, line.size(), out_);
  std::fflush(out_);
  line_open_ = terminal_;
  held_back_ = false;
  last_write_ = now;
}

std::size_t Progress::terminal_width() const {
  winsize size{};
  const int fd = terminal_fd_ >= 0 ? terminal_fd_ : ::fileno(out_);
  return ::ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col > 1 ? size.ws_col : 80;
}

double Progress::recent_rate(double now) const {
  const auto [time, done] = window_.front();
  return now > time ? static_cast<double>(latest_.done - done) / (now - time) : 0.0;
}

}  // namespace holdfast::train
