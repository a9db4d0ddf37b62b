// Files that are whole or as they were; most of them on disk, too.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "holdfast/collectives/status.h"

namespace holdfast {

// Puts `bytes` in the place of `path` (mode 0600): a reader, and whoever comes after a power cut, finds the
// old file or the new one. By way of the file `fresh`, in the same folder and of this writer alone.
// `last_look` is asked when that is on disk, right before it takes the other's place; when it is not ok,
// nothing does. Otherwise INTERNAL, with the reason, on failure; the old file is then still there, unless it
// was only the folder that could not be synced.
Status replace_file(const std::string& path, const std::string& fresh, std::string_view bytes,
                    const std::function<Status()>& last_look);

// The same for what is no evidence: a reader finds the old file or the new one, but after a power cut
// anything. Several threads and processes may do so at once; one of them is the last.
Status replace_file_unsynced(const std::string& path, std::string_view bytes);

// Removes what writers that were killed in replace_file_unsynced() left beside the files of `folder`. A call
// that is in the middle of it fails.
void remove_half_written(const std::string& folder);

// All of a regular file, or why not.
std::optional<std::string> read_whole(const std::string& path, std::size_t most_bytes, std::string* bytes);
// The last `most_bytes` of it.
std::optional<std::string> read_tail(const std::string& path, std::size_t most_bytes, std::string* bytes);

}  // namespace holdfast
