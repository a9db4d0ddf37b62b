#include "durable_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <vector>

#include "storage/posix_io.h"

namespace holdfast {
namespace {

// A file that was not there; -1, with errno.
int create(const std::string& path) {
  return open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
}

enum class Sync { kYes, kNo };

// Fills what create() gave, and closes it; false, with errno, on failure.
bool fill(int fd, std::string_view bytes, Sync sync) {
  if (fd < 0) return false;
  const bool written = write_all(fd, bytes) && (sync == Sync::kNo || sync_all(fd));
  const int why = errno;
  const bool closed = close_file(fd);
  if (!written) errno = why;
  return written && closed;
}

constexpr std::string_view kFreshMark = ".new.";

// Its own for each call: several threads and processes may write the same file at once.
int create_beside(const std::string& path, std::string* fresh) {
  static std::atomic<std::uint64_t> count = 0;
  constexpr int kMostTries = 100;
  int fd = -1;
  for (int i = 0; i < kMostTries; ++i) {
    *fresh = fmt::format("{}{}{}.{}", path, kFreshMark, getpid(), count++);
    fd = create(*fresh);
    // Taken: by a process of the same number, on another host or killed earlier.
    if (fd >= 0 || errno != EEXIST) break;
  }
  return fd;
}

bool is_number(std::string_view text) {
  return !text.empty() && std::ranges::all_of(text, [](char c) { return c >= '0' && c <= '9'; });
}

// Whether create_beside() gives such names.
bool is_fresh_name(std::string_view name) {
  const std::size_t mark = name.rfind(kFreshMark);
  if (mark == std::string_view::npos || mark == 0) return false;
  const std::string_view numbers = name.substr(mark + kFreshMark.size());
  const std::size_t dot = numbers.find('.');
  return dot != std::string_view::npos && is_number(numbers.substr(0, dot)) &&
         is_number(numbers.substr(dot + 1));
}

}  // namespace

Status replace_file(const std::string& path, const std::string& fresh, std::string_view bytes,
                    const std::function<Status()>& last_look) {
  const auto parent = std::filesystem::path(path).parent_path();
  const std::string folder = parent.empty() ? "." : parent.string();
  unlink(fresh.c_str());  // left by a writer that was killed
  bool replaced = fill(create(fresh), bytes, Sync::kYes);
  if (replaced) {
    if (Status s = last_look(); !s.ok()) {
      unlink(fresh.c_str());
      return s;
    }
    replaced = std::rename(fresh.c_str(), path.c_str()) == 0 && sync_folder_at(folder);
  }
  if (replaced) return Status();
  const std::string why = std::strerror(errno);
  unlink(fresh.c_str());
  return Status::internal("cannot write " + path + ": " + why);
}

Status replace_file_unsynced(const std::string& path, std::string_view bytes) {
  std::string fresh;
  const int fd = create_beside(path, &fresh);
  if (fill(fd, bytes, Sync::kNo) && std::rename(fresh.c_str(), path.c_str()) == 0) return Status();
  const std::string why = std::strerror(errno);
  if (fd >= 0) unlink(fresh.c_str());
  return Status::internal("cannot write " + path + ": " + why);
}

void remove_half_written(const std::string& folder) {
  std::error_code none;
  std::vector<std::string> left;
  for (std::filesystem::directory_iterator entry(folder, none), end; !none && entry != end;
       entry.increment(none)) {
    if (is_fresh_name(entry->path().filename().native())) left.push_back(entry->path().native());
  }
  for (const std::string& path : left) unlink(path.c_str());
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
