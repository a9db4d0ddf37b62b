// The system's calls, gone on with when a signal interrupts them. All say false, with errno, on failure.
#pragma once

#include <string>
#include <string_view>

namespace holdfast {

// All of `bytes`, from the file's position.
bool write_all(int fd, std::string_view bytes);
bool sync_all(int fd);
// A failure is what a network file system says that has kept the bytes until now. The descriptor is gone in
// any case.
bool close_file(int fd);
// Names in the folder `path` are on disk.
bool sync_folder_at(const std::string& path);

}  // namespace holdfast
