// Reads an event log as strictly as anybody may.
#pragma once

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "coord/temp_dir.h"

namespace holdfast {

using Json = nlohmann::ordered_json;

// Every line of `text`, each of which must be one JSON object of printable ASCII and end in a newline.
inline std::vector<Json> parse_events(const std::string& text) {
  std::vector<Json> events;
  EXPECT_TRUE(text.empty() || text.back() == '\n') << "half a line at the end";
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    for (const char c : line) EXPECT_TRUE(c >= ' ' && c <= '~') << "byte " << static_cast<int>(c);
    // No exceptions, no comments: the parser takes what RFC 8259 takes and nothing else.
    const Json event = Json::parse(line, nullptr, false, false);
    EXPECT_TRUE(event.is_object()) << line;
    events.push_back(event);
  }
  return events;
}

inline std::vector<Json> read_events(const std::string& run_dir) {
  return parse_events(read_file(run_dir + "/events.jsonl"));
}

inline std::vector<Json> events_named(const std::string& run_dir, const std::string& name) {
  std::vector<Json> named;
  for (const Json& event : read_events(run_dir)) {
    if (event.at("event") == name) named.push_back(event);
  }
  return named;
}

}  // namespace holdfast
