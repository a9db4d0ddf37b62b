#include "experiment_log.h"

#include <sstream>

#include "holdfast/coord/printable.h"

namespace holdfast {
namespace {

constexpr std::uint64_t kLargestLog = 64 << 20;  // that is read
constexpr std::uint64_t kMostBytes = 32 << 20;   // that are written: a full log can still be read
constexpr char kFull[] = "log_full";

// As text: a line that somebody else put there need not be anything that can be parsed.
std::string without_time(const std::string& line) {
  constexpr std::string_view kKey = "\"time\":\"";
  const auto begin = line.find(kKey);
  const auto end = begin == std::string::npos ? begin : line.find('"', begin + kKey.size());
  return end == std::string::npos ? line : line.substr(0, begin + kKey.size()) + line.substr(end);
}

// As EventLog writes it, but for the time.
std::string line_of(const std::string& name, const nlohmann::ordered_json& fields) {
  nlohmann::ordered_json line = {{"event", name}, {"time", ""}};
  line.update(fields);
  return line.dump(-1, ' ', true, nlohmann::ordered_json::error_handler_t::replace);
}

}  // namespace

Status ExperimentLog::open() {
  const FileKind kind = files_.kind(path_);
  if (kind != FileKind::kNone && kind != FileKind::kFile)
    return Status::internal(printable(path_) + " is no regular file");
  if (kind == FileKind::kFile) {
    if (Status s = drop_half_line(path_); !s.ok()) return s;
    std::string text;
    if (Status s = read_file(files_, path_, kLargestLog, &text); !s.ok()) return s;
    bytes_ = text.size();
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) known_.insert(without_time(line));
  }
  if (Status s = log_.open(path_); !s.ok()) return s;
  is_open_ = true;
  return Status();
}

Status ExperimentLog::keep(const std::string& name, const nlohmann::ordered_json& fields) {
  if (!is_open_) {
    if (Status s = open(); !s.ok()) return s;
  }
  if (known_.contains(line_of(name, fields))) return Status();
  if (bytes_ < kMostBytes) return append(name, fields);
  const nlohmann::ordered_json limit = {{"most_bytes", kMostBytes}};
  if (!known_.contains(line_of(kFull, limit))) {
    if (Status s = append(kFull, limit); !s.ok()) return s;
  }
  return Status::internal(printable(path_) + " has its " + std::to_string(kMostBytes) +
                          " bytes: move it away");
}

Status ExperimentLog::append(const std::string& name, const nlohmann::ordered_json& fields) {
  if (Status s = log_.append(name, fields); !s.ok()) return s;
  std::string line = line_of(name, fields);
  bytes_ += line.size();
  known_.insert(std::move(line));
  return Status();
}

}  // namespace holdfast
