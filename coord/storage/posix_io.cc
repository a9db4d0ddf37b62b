#include "posix_io.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

namespace holdfast {

int open_log(const std::string& path) {
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NONBLOCK, 0600);
  struct stat info {};
  if (fd < 0) return fd;
  int why = 0;
  if (fstat(fd, &info) != 0) {
    why = errno;
  } else if (!S_ISREG(info.st_mode)) {
    why = ENXIO;  // what open() says of a pipe that nobody reads
  }
  if (why == 0) return fd;
  close(fd);
  errno = why;
  return -1;
}

bool write_all(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = write(fd, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    bytes.remove_prefix(static_cast<std::size_t>(n));
  }
  return true;
}

bool sync_all(int fd) {
  int failed = 0;
  do {
    failed = fsync(fd);
  } while (failed != 0 && errno == EINTR);
  return failed == 0;
}

bool close_file(int fd) {
  // Linux closes the descriptor even when interrupted; a second try could close somebody else's.
  return close(fd) == 0 || errno == EINTR;
}

bool sync_folder_at(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return false;
  // Some file systems have no fsync of folders; their renames are durable by themselves or not at all.
  const bool synced = sync_all(fd) || errno == EINVAL;
  const int why = errno;
  close(fd);
  errno = why;
  return synced;
}

}  // namespace holdfast
