#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "holdfast/coord/storage/file_system.h"
#include "posix_io.h"

namespace holdfast {
namespace {

constexpr mode_t kPermissions = 07777;

Status failed(std::string_view verb, const std::string& path, std::string_view why) {
  return Status::internal("cannot " + std::string(verb) + " " + path + ": " + std::string(why));
}

Status failed(std::string_view verb, const std::string& path) {
  return failed(verb, path, std::strerror(errno));
}

class RealWritableFile final : public WritableFile {
 public:
  RealWritableFile(std::string path, int fd) : path_(std::move(path)), fd_(fd) {}
  ~RealWritableFile() override {
    if (fd_ >= 0) close_file(fd_);
  }
  RealWritableFile(const RealWritableFile&) = delete;
  RealWritableFile& operator=(const RealWritableFile&) = delete;

  Status append(std::string_view bytes) override {
    return write_all(fd_, bytes) ? Status() : failed("write", path_);
  }
  Status sync() override { return sync_all(fd_) ? Status() : failed("sync", path_); }
  Status close() override { return close_file(std::exchange(fd_, -1)) ? Status() : failed("close", path_); }

 private:
  const std::string path_;
  int fd_;
};

class RealReadableFile final : public ReadableFile {
 public:
  RealReadableFile(std::string path, int fd, std::uint64_t size)
      : path_(std::move(path)), fd_(fd), size_(size) {}
  ~RealReadableFile() override { ::close(fd_); }
  RealReadableFile(const RealReadableFile&) = delete;
  RealReadableFile& operator=(const RealReadableFile&) = delete;

  std::uint64_t size() const override { return size_; }

  Status read(std::uint64_t offset, std::span<std::byte> to) const override {
    if (offset > size_ || to.size() > size_ - offset) return ends_early(size_);
    while (!to.empty()) {
      const ssize_t n = pread(fd_, to.data(), to.size(), static_cast<off_t>(offset));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return failed("read", path_);
      if (n == 0) return ends_early(offset);  // somebody has cut it
      to = to.subspan(static_cast<std::size_t>(n));
      offset += static_cast<std::uint64_t>(n);
    }
    return Status();
  }

 private:
  Status ends_early(std::uint64_t at) const {
    return failed("read", path_, "it ends after " + std::to_string(at) + " bytes");
  }

  const std::string path_;
  const int fd_;
  const std::uint64_t size_;
};

class RealFileSystem final : public FileSystem {
 public:
  Status create_folder(const std::string& path) override {
    if (mkdir(path.c_str(), 0700) != 0) {
      if (errno != EEXIST) return failed("make the folder", path);
      return kind(path) == FileKind::kFolder ? Status()
                                             : failed("make the folder", path, "that name is taken");
    }
    // The umask may have taken bits away.
    struct stat info = {};
    if (lstat(path.c_str(), &info) != 0) return failed("make the folder", path);
    if ((info.st_mode & 0700) != 0700 && chmod(path.c_str(), 0700) != 0) {
      return failed("make the folder", path);
    }
    return Status();
  }

  Status create_file(const std::string& path, std::unique_ptr<WritableFile>* out) override {
    const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0) return failed("create", path);
    auto file = std::make_unique<RealWritableFile>(path, fd);
    struct stat info = {};
    if (fstat(fd, &info) != 0) return failed("create", path);
    if ((info.st_mode & kPermissions) != 0600 && fchmod(fd, 0600) != 0) return failed("create", path);
    *out = std::move(file);
    return Status();
  }

  Status open_file(const std::string& path, std::unique_ptr<ReadableFile>* out) override {
    // O_NONBLOCK: a pipe that nobody writes to does not hang us.
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY);
    if (fd < 0) {
      return errno == ELOOP ? failed("open", path, "it is a symbolic link") : failed("open", path);
    }
    struct stat info = {};
    const bool known = fstat(fd, &info) == 0;
    Status status;
    if (!known) status = failed("open", path);
    if (known && !S_ISREG(info.st_mode)) status = failed("open", path, "it is no regular file");
    if (!status.ok()) {
      ::close(fd);
      return status;
    }
    *out = std::make_unique<RealReadableFile>(path, fd, static_cast<std::uint64_t>(info.st_size));
    return Status();
  }

  Status rename(const std::string& from, const std::string& to) override {
    if (std::rename(from.c_str(), to.c_str()) == 0) return Status();
    return failed("rename", from + " to " + to);
  }

  Status sync_folder(const std::string& path) override {
    return sync_folder_at(path) ? Status() : failed("sync the folder", path);
  }

  Status list(const std::string& path, std::vector<std::string>* names) override {
    names->clear();
    const int fd = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0) return failed("list", path);
    DIR* folder = fdopendir(fd);
    if (folder == nullptr) {
      Status status = failed("list", path);
      ::close(fd);
      return status;
    }
    errno = 0;
    while (const dirent* entry = readdir(folder)) {
      const std::string_view name = entry->d_name;
      if (name != "." && name != "..") names->emplace_back(name);
      errno = 0;
    }
    Status status = errno == 0 ? Status() : failed("list", path);
    closedir(folder);
    std::sort(names->begin(), names->end());
    return status;
  }

  FileKind kind(const std::string& path) override {
    struct stat info = {};
    if (lstat(path.c_str(), &info) != 0) {
      return errno == ENOENT || errno == ENOTDIR ? FileKind::kNone : FileKind::kOther;
    }
    if (S_ISREG(info.st_mode)) return FileKind::kFile;
    return S_ISDIR(info.st_mode) ? FileKind::kFolder : FileKind::kOther;
  }

  Status remove_file(const std::string& path) override {
    return unlink(path.c_str()) == 0 ? Status() : failed("remove", path);
  }

  Status remove_folder(const std::string& path) override {
    return rmdir(path.c_str()) == 0 ? Status() : failed("remove the folder", path);
  }

  Status free_bytes(const std::string& path, std::uint64_t* bytes) override {
    struct statvfs info = {};
    int none = 0;
    do {
      none = statvfs(path.c_str(), &info);
    } while (none != 0 && errno == EINTR);
    if (none != 0) return failed("see how much is free in", path);
    *bytes = std::uint64_t{info.f_bavail} * info.f_frsize;
    return Status();
  }
};

}  // namespace

FileSystem& real_file_system() {
  static RealFileSystem files;
  return files;
}

}  // namespace holdfast
