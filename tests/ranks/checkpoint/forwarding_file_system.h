// File systems that show a rank something else than what is on the disk.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <utility>

#include "holdfast/coord/storage/file_system.h"

namespace holdfast {

class ForwardingFileSystem : public FileSystem {
 public:
  Status create_folder(const std::string& path) override { return disk_.create_folder(path); }
  Status create_file(const std::string& path, std::unique_ptr<WritableFile>* out) override {
    return disk_.create_file(path, out);
  }
  Status open_file(const std::string& path, std::unique_ptr<ReadableFile>* out) override {
    return disk_.open_file(path, out);
  }
  Status rename(const std::string& from, const std::string& to) override { return disk_.rename(from, to); }
  Status sync_folder(const std::string& path) override { return disk_.sync_folder(path); }
  Status list(const std::string& path, std::vector<std::string>* names) override {
    return disk_.list(path, names);
  }
  FileKind kind(const std::string& path) override { return disk_.kind(path); }
  Status remove_file(const std::string& path) override { return disk_.remove_file(path); }
  Status remove_folder(const std::string& path) override { return disk_.remove_folder(path); }
  Status free_bytes(const std::string& path, std::uint64_t* bytes) override {
    return disk_.free_bytes(path, bytes);
  }

 private:
  FileSystem& disk_ = real_file_system();
};

// Paths in which one of the texts occurs are not there.
class HidingFileSystem final : public ForwardingFileSystem {
 public:
  explicit HidingFileSystem(std::vector<std::string> hidden) : hidden_(std::move(hidden)) {}

  Status open_file(const std::string& path, std::unique_ptr<ReadableFile>* out) override {
    if (hides(path)) return Status::internal("cannot open " + path + ": No such file or directory");
    return ForwardingFileSystem::open_file(path, out);
  }
  FileKind kind(const std::string& path) override {
    return hides(path) ? FileKind::kNone : ForwardingFileSystem::kind(path);
  }
  Status list(const std::string& path, std::vector<std::string>* names) override {
    Status status = ForwardingFileSystem::list(path, names);
    std::erase_if(*names, [&](const std::string& name) { return hides(path + "/" + name); });
    return status;
  }

 private:
  bool hides(const std::string& path) const {
    for (const std::string& text : hidden_) {
      if (path.find(text) != std::string::npos) return true;
    }
    return false;
  }
  const std::vector<std::string> hidden_;
};

// No file is made before open() is called: a disk that is as slow as a test wants it.
class GatedFileSystem final : public ForwardingFileSystem {
 public:
  Status create_file(const std::string& path, std::unique_ptr<WritableFile>* out) override {
    {
      std::unique_lock lock(mutex_);
      ++waiting_;
      changed_.notify_all();
      changed_.wait(lock, [&] { return open_; });
      --waiting_;
    }
    return ForwardingFileSystem::create_file(path, out);
  }
  void close() {
    const std::lock_guard lock(mutex_);
    open_ = false;
  }
  void open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  void wait_for_a_writer() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return waiting_ > 0; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = true;
  int waiting_ = 0;
};

}  // namespace holdfast
