#include "durable_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>

namespace holdfast {
namespace {

bool write_new(const std::string& path, std::string_view bytes) {
  unlink(path.c_str());  // left by a writer that was killed
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd < 0) return false;
  const bool written = write_all(fd, bytes) && fsync(fd) == 0;
  const int why = errno;
  const bool closed = close(fd) == 0;  // a network file system may only now say that it is full
  if (!written) errno = why;
  return written && closed;
}

bool sync_folder(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return false;
  // Some file systems have no fsync of folders; their renames are durable by themselves or not at all.
  const bool synced = fsync(fd) == 0 || errno == EINVAL;
  const int why = errno;
  close(fd);
  errno = why;
  return synced;
}

}  // namespace

bool write_all(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = write(fd, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    bytes.remove_prefix(static_cast<std::size_t>(n));
  }
  return true;
}

Status replace_file(const std::string& path, const std::string& fresh, std::string_view bytes,
                    const std::function<Status()>& last_look) {
  const auto parent = std::filesystem::path(path).parent_path();
  const std::string folder = parent.empty() ? "." : parent.string();
  bool replaced = write_new(fresh, bytes);
  if (replaced) {
    if (Status s = last_look(); !s.ok()) {
      unlink(fresh.c_str());
      return s;
    }
    replaced = std::rename(fresh.c_str(), path.c_str()) == 0 && sync_folder(folder);
  }
  if (replaced) return Status();
  const std::string why = std::strerror(errno);
  unlink(fresh.c_str());
  return Status::internal("cannot write " + path + ": " + why);
}

}  // namespace holdfast
