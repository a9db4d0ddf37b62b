// A folder that appears with everything in it, or not at all.
//
//   PARENT/.NAME.partial     while it is written; nobody takes it for the real one
//   PARENT/NAME              after publish(): on disk, whole
//
// Several processes may write files into one partial folder: begin_publication() makes it or finds it made,
// and who publishes does so when the others have synced theirs.
#pragma once

#include <string>
#include <string_view>

#include "holdfast/coord/storage/file_system.h"

namespace holdfast {

std::string partial_path(const std::string& parent, std::string_view name);

Status begin_publication(FileSystem& files, const std::string& parent, std::string_view name);

// One file of it: created, written, synced and closed. For small files; larger ones do the same by hand.
Status write_synced(FileSystem& files, const std::string& path, std::string_view bytes);

// Syncs the partial folder, renames it and syncs the parent. Fails when there is a NAME already. After a
// failure of the last step alone NAME is there, and only not known to be on disk.
Status publish(FileSystem& files, const std::string& parent, std::string_view name);

// Removes partial folders, such as a killed run leaves. Only who holds the lock on all of `parent` may.
Status remove_partials(FileSystem& files, const std::string& parent);

}  // namespace holdfast
