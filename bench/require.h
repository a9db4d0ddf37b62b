// What is timed has to be right: ends the program otherwise.
#pragma once

#include <errno.h>
#include <fmt/format.h>

#include <cstdlib>
#include <string>

#include "holdfast/collectives/status.h"

namespace holdfast::bench {

inline void require(bool good, const std::string& what) {
  if (good) return;
  fmt::print(stderr, "{}: {}\n", program_invocation_short_name, what);
  std::exit(1);
}
inline void require(const Status& status) { require(status.ok(), status.to_string()); }

}  // namespace holdfast::bench
