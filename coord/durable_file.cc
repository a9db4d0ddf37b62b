#include "durable_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>

namespace holdfast {
namespace {

enum class Sync { kYes, kNo };

bool write_new(const std::string& path, std::string_view bytes, Sync sync) {
  unlink(path.c_str());  // left by a writer that was killed
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd < 0) return false;
  const bool written = write_all(fd, bytes) && (sync == Sync::kNo || fsync(fd) == 0);
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
  bool replaced = write_new(fresh, bytes, Sync::kYes);
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

Status replace_file_unsynced(const std::string& path, std::string_view bytes) {
  const std::string fresh = path + ".new";
  if (write_new(fresh, bytes, Sync::kNo) && std::rename(fresh.c_str(), path.c_str()) == 0) return Status();
  const std::string why = std::strerror(errno);
  unlink(fresh.c_str());
  return Status::internal("cannot write " + path + ": " + why);
}

std::optional<std::string> read_whole(const std::string& path, std::size_t most_bytes, std::string* bytes) {
  if (const auto fault = read_tail(path, most_bytes + 1, bytes)) return fault;
  return bytes->size() > most_bytes ? std::optional<std::string>("too large") : std::nullopt;
}

std::optional<std::string> read_tail(const std::string& path, std::size_t most_bytes, std::string* bytes) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return std::strerror(errno);
  struct stat info = {};
  std::optional<std::string> fault;
  const auto most = static_cast<off_t>(most_bytes);
  if (fstat(fd, &info) != 0) {
    fault = std::strerror(errno);
  } else if (!S_ISREG(info.st_mode)) {
    fault = "not a file";
  } else if (info.st_size > most) {
    lseek(fd, info.st_size - most, SEEK_SET);
  }
  bytes->clear();
  char part[1 << 14];
  for (ssize_t n = 1; !fault && n > 0 && bytes->size() < most_bytes;) {  // it may grow meanwhile
    n = read(fd, part, std::min(sizeof part, most_bytes - bytes->size()));
    if (n < 0) fault = std::strerror(errno);
    if (n > 0) bytes->append(part, static_cast<std::size_t>(n));
  }
  close(fd);
  return fault;
}

}  // namespace holdfast
