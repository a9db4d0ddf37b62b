#include "holdfast/coord/run_folder.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <random>
#include <string_view>
#include <thread>

#include "durable_file.h"
#include "holdfast/coord/printable.h"
#include "holdfast/coord/state.h"

namespace holdfast {
namespace {

constexpr int kLockTries = 5;

Status make_private_folder(const std::string& path) {
  std::error_code error;
  const auto parent = std::filesystem::path(path).parent_path();
  if (!parent.empty()) std::filesystem::create_directories(parent, error);
  if (error) return Status::usage("cannot make " + parent.string() + ": " + error.message());
  if (mkdir(path.c_str(), 0700) == 0) return Status();
  const int why = errno;
  if (why != EEXIST || !std::filesystem::is_directory(path, error)) {
    return Status::usage("cannot make the run folder " + path + ": " + std::strerror(why));
  }
  // Somebody else's folder is not ours to close to others, or to fill.
  const bool ours = std::filesystem::exists(path + "/lock", error) ||
                    std::filesystem::exists(path + "/events.jsonl", error);
  if (!ours && !std::filesystem::is_empty(path, error) && !error) {
    return Status::usage("the run folder " + path + " is not empty, and no run made it; choose another");
  }
  if (error) return Status::usage("cannot look into the run folder " + path + ": " + error.message());
  if (chmod(path.c_str(), 0700) != 0) {
    return Status::usage("cannot make the run folder " + path + " private: " + std::strerror(errno));
  }
  return Status();
}

// "" while it is being written.
std::string read_line(int fd) {
  char text[512];
  const ssize_t n = pread(fd, text, sizeof(text), 0);
  const std::string line(text, n > 0 ? static_cast<std::size_t>(n) : 0);
  const std::size_t end = line.find('\n');
  return end == std::string::npos ? "" : line.substr(0, end);
}

std::string holder_process(std::string_view host, std::int64_t pid) {
  return fmt::format("host={} pid={} run=", host, pid);
}

std::string this_holder() {
  char host[256] = "?";
  gethostname(host, sizeof(host) - 1);
  std::random_device random;
  const std::uint64_t number = (std::uint64_t{random()} << 32) | random();
  return fmt::format("{}{:016x}", holder_process(host, getpid()), number);
}

Status write_holder(int fd, const std::string& holder) {
  const std::string line = holder + "\n";
  if (ftruncate(fd, 0) == 0 && pwrite(fd, line.data(), line.size(), 0) == static_cast<ssize_t>(line.size())) {
    return Status();
  }
  return Status::internal("cannot write the run folder's lock: " + std::string(std::strerror(errno)));
}

}  // namespace

bool is_holder(const std::string& holder, std::string_view host, std::int64_t pid) {
  return holder.starts_with(holder_process(host, pid));
}

RunFolder::~RunFolder() {
  if (lock_fd_ >= 0) close(lock_fd_);
}

Status RunFolder::lock(const std::string& path) {
  path_ = path;
  const std::string lock_path = path + "/lock";
  lock_fd_ = ::open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (lock_fd_ < 0) return Status::usage("cannot open " + lock_path + ": " + std::strerror(errno));
  // Somebody may only be looking whether it is held, see live_holder().
  for (int i = 0; i < kLockTries; ++i) {
    if (i > 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    if (flock(lock_fd_, LOCK_EX | LOCK_NB) == 0) return Status();
    if (errno != EWOULDBLOCK) return Status::usage("cannot lock " + lock_path + ": " + std::strerror(errno));
  }
  return Status::usage("the run folder " + path + " is in use by another run (" +
                       printable(read_line(lock_fd_)) + "); choose another with --run-dir");
}

std::optional<std::string> RunFolder::live_holder(const std::string& path) {
  const int fd = ::open((path + "/lock").c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return std::nullopt;
  std::optional<std::string> holder;
  if (flock(fd, LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK) holder = read_line(fd);
  close(fd);
  return holder;
}

bool RunFolder::holds_record(const std::string& path) {
  std::error_code none;
  // An empty log is left by a start that was refused.
  const auto size = std::filesystem::file_size(path + "/events.jsonl", none);
  return (!none && size > 0) || std::filesystem::exists(state_path(path), none);
}

Status RunFolder::create(const std::string& path) {
  if (Status s = make_private_folder(path); !s.ok()) return s;
  if (Status s = lock(path); !s.ok()) return s;
  if (holds_record(path)) {
    return Status::usage("the run folder " + path +
                         " holds the record of an earlier run; choose another, or resume that run (--resume, GuardOptions::resume)");
  }
  return take();
}

Status RunFolder::open(const std::string& path) {
  if (!holds_record(path)) return Status::usage("there is no run in " + path);
  if (Status s = lock(path); !s.ok()) return s;
  return take();
}

// With the lock. What is half written was meant for earlier runs: nobody can ask this one for anything yet.
Status RunFolder::take() {
  remove_half_written(path_);
  holder_ = this_holder();
  return write_holder(lock_fd_, holder_);
}

}  // namespace holdfast
