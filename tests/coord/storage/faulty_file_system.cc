#include "coord/storage/faulty_file_system.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "holdfast/coord/storage/publication.h"

namespace holdfast {
namespace {

constexpr int kKilled = 137;

std::string parent_of(const std::string& path) { return path.substr(0, path.rfind('/')); }

bool is_within(const std::string& path, const std::string& folder) { return path.starts_with(folder + "/"); }

Status failed(const std::string& name, const std::string& path, const std::string& reason) {
  return Status::internal("cannot " + name + " " + path + ": " + reason);
}

}  // namespace

class FaultyFileSystem::Written final : public WritableFile {
 public:
  Written(FaultyFileSystem& files, std::shared_ptr<File> state, std::unique_ptr<WritableFile> file)
      : files_(files), state_(std::move(state)), path_(state_->path), file_(std::move(file)) {}

  Status append(std::string_view bytes) override {
    return files_.call(
        "append", path_, [&] { return files_.append(*file_, *state_, bytes); },
        [&] { return files_.append(*file_, *state_, bytes.substr(0, bytes.size() / 2)); });
  }
  Status sync() override {
    return files_.call("sync", path_, [&] {
      Status status = file_->sync();
      if (status.ok()) state_->synced = state_->size;
      return status;
    });
  }
  Status close() override {
    return files_.call("close", path_, [&] { return file_->close(); });
  }

 private:
  FaultyFileSystem& files_;
  const std::shared_ptr<File> state_;
  const std::string path_;  // as it was made
  const std::unique_ptr<WritableFile> file_;
};

class FaultyFileSystem::Read final : public ReadableFile {
 public:
  Read(FaultyFileSystem& files, std::string path, std::unique_ptr<ReadableFile> file)
      : files_(files), path_(std::move(path)), file_(std::move(file)) {}

  std::uint64_t size() const override { return file_->size(); }
  Status read(std::uint64_t offset, std::span<std::byte> to) const override {
    return files_.call("read", path_, [&] { return file_->read(offset, to); });
  }

 private:
  FaultyFileSystem& files_;
  const std::string path_;
  const std::unique_ptr<ReadableFile> file_;
};

int FaultyFileSystem::calls() const {
  const std::lock_guard lock(mutex_);
  return static_cast<int>(log_.size());
}

std::vector<std::string> FaultyFileSystem::log() const {
  const std::lock_guard lock(mutex_);
  return log_;
}

std::uint64_t FaultyFileSystem::appended_bytes() const {
  const std::lock_guard lock(mutex_);
  return appended_;
}

void FaultyFileSystem::fail_at(int n, std::string reason) {
  const std::lock_guard lock(mutex_);
  fail_at_ = n;
  reason_ = std::move(reason);
}

void FaultyFileSystem::fail_from(int n, std::string reason) {
  const std::lock_guard lock(mutex_);
  fail_from_ = n;
  reason_ = std::move(reason);
}

void FaultyFileSystem::full_after(std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  fits_ = bytes;
}

void FaultyFileSystem::space_is_back() { full_after(kNoLimit); }

void FaultyFileSystem::report_free(std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  reported_free_ = bytes;
}

void FaultyFileSystem::die_at(int n, When when) {
  const std::lock_guard lock(mutex_);
  die_at_ = n;
  when_ = when;
}

void FaultyFileSystem::exit_at(int n, When when) {
  die_at(n, when);
  const std::lock_guard lock(mutex_);
  exits_ = true;
}

bool FaultyFileSystem::dead() const {
  const std::lock_guard lock(mutex_);
  return dead_;
}

Status FaultyFileSystem::call(const std::string& name, const std::string& path,
                              const std::function<Status()>& run, const std::function<Status()>& torn) {
  const std::lock_guard lock(mutex_);
  if (dead_) return failed(name, path, "the process has died");
  log_.push_back(name + " " + path);
  const int n = static_cast<int>(log_.size());
  if (n == fail_at_ || n >= fail_from_) return failed(name, path, reason_);
  const bool last = n == die_at_;
  if (last && when_ == When::kBefore) return die(name, path);
  if (last && when_ == When::kTorn) {
    if (torn) (void)torn();
    return die(name, path);
  }
  Status status = run();
  return last ? die(name, path) : status;
}

Status FaultyFileSystem::die(const std::string& name, const std::string& path) {
  if (exits_) _exit(kKilled);
  dead_ = true;
  return failed(name, path, "the process has died");
}

Status FaultyFileSystem::append(WritableFile& file, File& state, std::string_view bytes) {
  const std::uint64_t n = std::min<std::uint64_t>(bytes.size(), fits_);
  if (Status s = file.append(bytes.substr(0, n)); !s.ok()) return s;
  state.size += n;
  appended_ += n;
  if (fits_ != kNoLimit) fits_ -= n;
  return n == bytes.size() ? Status() : failed("append", state.path, std::strerror(ENOSPC));
}

Status FaultyFileSystem::create_folder(const std::string& path) {
  return call("create_folder", path, [&] {
    const bool made = disk_.kind(path) == FileKind::kNone;
    Status status = disk_.create_folder(path);
    if (status.ok() && made) changes_.push_back({Change::kMade, path, "", {}, {parent_of(path)}});
    return status;
  });
}

Status FaultyFileSystem::create_file(const std::string& path, std::unique_ptr<WritableFile>* out) {
  return call("create_file", path, [&] {
    std::unique_ptr<WritableFile> file;
    if (Status s = disk_.create_file(path, &file); !s.ok()) return s;
    changes_.push_back({Change::kMade, path, "", {}, {parent_of(path)}});
    files_.push_back(std::make_shared<File>(File{path}));
    *out = std::make_unique<Written>(*this, files_.back(), std::move(file));
    return Status();
  });
}

Status FaultyFileSystem::open_file(const std::string& path, std::unique_ptr<ReadableFile>* out) {
  return call("open_file", path, [&] {
    std::unique_ptr<ReadableFile> file;
    if (Status s = disk_.open_file(path, &file); !s.ok()) return s;
    *out = std::make_unique<Read>(*this, path, std::move(file));
    return Status();
  });
}

Status FaultyFileSystem::rename(const std::string& from, const std::string& to) {
  return call("rename", from, [&] {
    std::optional<std::string> replaced = durable_content(to);
    if (Status s = disk_.rename(from, to); !s.ok()) return s;
    forget(to);
    moved(from, to);
    changes_.push_back({Change::kRenamed, to, from, std::move(replaced), {parent_of(from), parent_of(to)}});
    return Status();
  });
}

Status FaultyFileSystem::sync_folder(const std::string& path) {
  return call("sync_folder", path, [&] {
    Status status = disk_.sync_folder(path);
    if (status.ok()) folder_synced(path);
    return status;
  });
}

Status FaultyFileSystem::list(const std::string& path, std::vector<std::string>* names) {
  return call("list", path, [&] { return disk_.list(path, names); });
}

Status FaultyFileSystem::remove_file(const std::string& path) {
  return call("remove_file", path, [&] {
    std::optional<std::string> content = durable_content(path);
    if (Status s = disk_.remove_file(path); !s.ok()) return s;
    forget(path);
    changes_.push_back({Change::kFileRemoved, path, "", std::move(content), {parent_of(path)}});
    return Status();
  });
}

Status FaultyFileSystem::remove_folder(const std::string& path) {
  return call("remove_folder", path, [&] {
    if (Status s = disk_.remove_folder(path); !s.ok()) return s;
    changes_.push_back({Change::kFolderRemoved, path, "", {}, {parent_of(path)}});
    return Status();
  });
}

Status FaultyFileSystem::free_bytes(const std::string& path, std::uint64_t* bytes) {
  const std::lock_guard lock(mutex_);
  if (dead_) return failed("free_bytes", path, "the process has died");
  if (!reported_free_) return disk_.free_bytes(path, bytes);
  *bytes = *reported_free_;
  return Status();
}

Status FaultyFileSystem::cut_power() {
  const std::lock_guard lock(mutex_);
  dead_ = true;
  Status first;
  const auto keep = [&first](Status next) {
    if (first.ok()) first = std::move(next);
  };
  for (const auto& file : files_) {
    if (file->synced == file->size) continue;
    const auto content = durable_content(file->path);
    keep(disk_.remove_file(file->path));
    keep(put(file->path, content.value_or("")));
  }
  while (!changes_.empty()) {
    const Change change = std::move(changes_.back());
    changes_.pop_back();
    keep(undo(change));
  }
  files_.clear();
  return first;
}

Status FaultyFileSystem::undo(const Change& change) {
  switch (change.kind) {
    case Change::kMade: return remove_tree(disk_, change.path);
    case Change::kFolderRemoved: return disk_.create_folder(change.path);
    case Change::kFileRemoved: return change.content ? put(change.path, *change.content) : Status();
    case Change::kRenamed: break;
  }
  if (Status s = disk_.rename(change.path, change.from); !s.ok()) return s;
  moved(change.path, change.from);
  return change.content ? put(change.path, *change.content) : Status();
}

void FaultyFileSystem::folder_synced(const std::string& path) {
  std::vector<std::string> gone;
  for (Change& change : changes_) {
    change.unsynced.erase(path);
    if (change.unsynced.empty() && change.kind == Change::kFolderRemoved) gone.push_back(change.path);
  }
  // Nothing comes back into a folder that is gone for good.
  for (const std::string& folder : gone) {
    std::erase_if(changes_, [&folder](const Change& change) { return is_within(change.path, folder); });
    for (Change& change : changes_) change.unsynced.erase(folder);
  }
  std::erase_if(changes_, [](const Change& change) { return change.unsynced.empty(); });
}

void FaultyFileSystem::moved(const std::string& from, const std::string& to) {
  const auto follow = [&](std::string path) {
    if (path == from) return to;
    return is_within(path, from) ? to + path.substr(from.size()) : path;
  };
  for (const auto& file : files_) file->path = follow(file->path);
  for (Change& change : changes_) {
    change.path = follow(change.path);
    change.from = follow(change.from);
    std::set<std::string> unsynced;
    for (const std::string& folder : change.unsynced) unsynced.insert(follow(folder));
    change.unsynced = std::move(unsynced);
  }
}

std::optional<std::string> FaultyFileSystem::durable_content(const std::string& path) {
  std::string bytes;
  if (disk_.kind(path) != FileKind::kFile || !read_file(disk_, path, kNoLimit, &bytes).ok())
    return std::nullopt;
  for (const auto& file : files_) {
    if (file->path == path) bytes.resize(std::min<std::uint64_t>(bytes.size(), file->synced));
  }
  return bytes;
}

void FaultyFileSystem::forget(const std::string& path) {
  std::erase_if(files_, [&path](const auto& file) { return file->path == path; });
}

Status FaultyFileSystem::put(const std::string& path, std::string_view bytes) {
  return write_synced(disk_, path, bytes);
}

}  // namespace holdfast
