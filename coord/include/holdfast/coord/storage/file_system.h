// The few calls by which evidence and checkpoints reach a disk, behind an interface, so that a test can fail,
// fill up, tear or end the process at any one of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "holdfast/collectives/status.h"

namespace holdfast {

// All failures are INTERNAL and name the path and the system's reason. Used by one thread at a time.
class WritableFile {
 public:
  virtual ~WritableFile() = default;  // closes it, if close() was not called, and cannot tell of a failure
  virtual Status append(std::string_view bytes) = 0;
  virtual Status sync() = 0;   // what was appended is on disk
  virtual Status close() = 0;  // a network file system may only now say that it is full
};

class ReadableFile {
 public:
  virtual ~ReadableFile() = default;
  virtual std::uint64_t size() const = 0;  // as of open_file()
  // All of `to`, from `offset`; a file that is too short is a failure.
  virtual Status read(std::uint64_t offset, std::span<std::byte> to) const = 0;
};

enum class FileKind {
  kNone,
  kFile,
  kFolder,
  kOther  // a symbolic link, a device, a pipe; and what cannot be looked at, since it may be in the way
};

// Any thread.
class FileSystem {
 public:
  virtual ~FileSystem() = default;

  // Mode 0700. One that is there already is fine if it is a folder and no symbolic link.
  virtual Status create_folder(const std::string& path) = 0;
  // Mode 0600. Fails when there is anything of that name.
  virtual Status create_file(const std::string& path, std::unique_ptr<WritableFile>* out) = 0;
  // A regular file; a symbolic link is refused.
  virtual Status open_file(const std::string& path, std::unique_ptr<ReadableFile>* out) = 0;
  // Atomic, within one file system. Replaces a file, never a folder that holds anything.
  virtual Status rename(const std::string& from, const std::string& to) = 0;
  // Names that were made, renamed or removed in the folder are on disk.
  virtual Status sync_folder(const std::string& path) = 0;
  // Names, sorted, without "." and "..". A symbolic link is refused.
  virtual Status list(const std::string& path, std::vector<std::string>* names) = 0;
  // What has this name; a symbolic link is not followed.
  virtual FileKind kind(const std::string& path) = 0;
  bool exists(const std::string& path) { return kind(path) != FileKind::kNone; }
  virtual Status remove_file(const std::string& path) = 0;
  virtual Status remove_folder(const std::string& path) = 0;  // an empty one
  // Bytes that this process may still write there.
  virtual Status free_bytes(const std::string& path, std::uint64_t* bytes) = 0;
};

FileSystem& real_file_system();

// All of a file that is no larger than `most_bytes`.
Status read_file(FileSystem& files, const std::string& path, std::uint64_t most_bytes, std::string* bytes);

// The folder with everything in it, symbolic links themselves and not what they point to; at most
// `most_depth` folders deep. Goes on after a failure and gives the first.
Status remove_tree(FileSystem& files, const std::string& path, int most_depth = 8);

// Bytes of the files in the folder, links not followed, at most `most_depth` folders deep.
Status tree_bytes(FileSystem& files, const std::string& path, std::uint64_t* bytes, int most_depth = 8);

}  // namespace holdfast
