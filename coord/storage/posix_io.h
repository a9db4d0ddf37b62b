// The system's calls, gone on with when a signal interrupts them. Those that give a bool say false, with
// errno, on failure.
#pragma once

#include <string>
#include <string_view>

namespace holdfast {

// A log to append to, made (mode 0600) when it is not there; -1, with errno, on failure. Never waits, and
// takes no pipe or device: one without a reader would hold up the training, and /dev/zero would swallow the
// record.
int open_log(const std::string& path);

// All of `bytes`, from the file's position.
bool write_all(int fd, std::string_view bytes);
bool sync_all(int fd);
// A failure is what a network file system says that has kept the bytes until now. The descriptor is gone in
// any case.
bool close_file(int fd);
// Names in the folder `path` are on disk.
bool sync_folder_at(const std::string& path);

}  // namespace holdfast
