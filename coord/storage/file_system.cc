#include "holdfast/coord/storage/file_system.h"

namespace holdfast {
namespace {

void keep_first(Status* first, Status next) {
  if (first->ok()) *first = std::move(next);
}

Status too_deep(const std::string& path) {
  return Status::internal(path + " holds folders that are nested too deeply");
}

}  // namespace

Status read_file(FileSystem& files, const std::string& path, std::uint64_t most_bytes, std::string* bytes) {
  bytes->clear();
  std::unique_ptr<ReadableFile> file;
  if (Status s = files.open_file(path, &file); !s.ok()) return s;
  if (file->size() > most_bytes) {
    return Status::internal(path + " is too large: " + std::to_string(file->size()) + " bytes, and at most " +
                            std::to_string(most_bytes) + " are read");
  }
  bytes->resize(file->size());
  Status status = file->read(0, std::as_writable_bytes(std::span(*bytes)));
  if (!status.ok()) bytes->clear();
  return status;
}

Status remove_tree(FileSystem& files, const std::string& path, int most_depth) {
  if (files.kind(path) != FileKind::kFolder) return files.remove_file(path);
  if (most_depth <= 0) return too_deep(path);
  std::vector<std::string> names;
  Status first = files.list(path, &names);
  for (const std::string& name : names) {
    keep_first(&first, remove_tree(files, path + "/" + name, most_depth - 1));
  }
  Status removed = files.remove_folder(path);  // a folder that is not empty now has a better reason
  keep_first(&first, std::move(removed));
  return first;
}

Status tree_bytes(FileSystem& files, const std::string& path, std::uint64_t* bytes, int most_depth) {
  *bytes = 0;
  if (most_depth <= 0) return too_deep(path);
  std::vector<std::string> names;
  if (Status s = files.list(path, &names); !s.ok()) return s;
  for (const std::string& name : names) {
    const std::string at = path + "/" + name;
    const FileKind kind = files.kind(at);
    if (kind == FileKind::kFolder) {
      std::uint64_t inner = 0;
      if (Status s = tree_bytes(files, at, &inner, most_depth - 1); !s.ok()) return s;
      *bytes += inner;
    } else if (kind == FileKind::kFile) {
      std::unique_ptr<ReadableFile> file;
      if (Status s = files.open_file(at, &file); !s.ok()) return s;
      *bytes += file->size();
    }
  }
  return Status();
}

}  // namespace holdfast
