// Files that are whole, and on disk, or as they were.
#pragma once

#include <string>
#include <string_view>

#include "holdfast/collectives/status.h"

namespace holdfast {

// All of `bytes`, from the file's position; false, with errno, on failure.
bool write_all(int fd, std::string_view bytes);

// Puts `bytes` in the place of `path` (mode 0600): a reader, and whoever comes after a power cut, finds the
// old file or the new one. By way of `path`.new, so one writer at a time. INTERNAL, with the reason, on
// failure; the old file is then still there.
Status replace_file(const std::string& path, std::string_view bytes);

}  // namespace holdfast
