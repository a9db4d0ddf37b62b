// experiments.jsonl of a bundle: what was tried on it, each once.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <set>
#include <string>

#include "holdfast/coord/event_log.h"
#include "holdfast/coord/storage/file_system.h"

namespace holdfast {

class ExperimentLog {
 public:
  // `files` must outlive it.
  ExperimentLog(FileSystem& files, std::string path) : files_(files), path_(std::move(path)) {}

  // One line, unless there is one that differs in nothing but its time. INTERNAL, saying why, when it cannot
  // be kept: nothing of that name but a file of a sane size is read or written. Once it has 32 MiB there is
  // one more line, "log_full", and nothing after it.
  Status keep(const std::string& name, const nlohmann::ordered_json& fields);

 private:
  Status open();
  Status append(const std::string& name, const nlohmann::ordered_json& fields);

  FileSystem& files_;
  const std::string path_;
  EventLog log_;
  bool is_open_ = false;
  std::uint64_t bytes_ = 0;
  std::set<std::string> known_;  // lines without their time
};

}  // namespace holdfast
