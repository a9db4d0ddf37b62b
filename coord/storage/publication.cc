#include "holdfast/coord/storage/publication.h"

namespace holdfast {
namespace {

constexpr std::string_view kPrefix = ".";
constexpr std::string_view kSuffix = ".partial";

bool is_partial(std::string_view name) {
  return name.size() > kPrefix.size() + kSuffix.size() && name.starts_with(kPrefix) &&
         name.ends_with(kSuffix);
}

}  // namespace

std::string partial_path(const std::string& parent, std::string_view name) {
  std::string path = parent + "/";
  path += kPrefix;
  path += name;
  path += kSuffix;
  return path;
}

Status begin_publication(FileSystem& files, const std::string& parent, std::string_view name) {
  return files.create_folder(partial_path(parent, name));
}

Status write_synced(FileSystem& files, const std::string& path, std::string_view bytes) {
  std::unique_ptr<WritableFile> file;
  if (Status s = files.create_file(path, &file); !s.ok()) return s;
  if (Status s = file->append(bytes); !s.ok()) return s;
  if (Status s = file->sync(); !s.ok()) return s;
  return file->close();
}

Status publish(FileSystem& files, const std::string& parent, std::string_view name) {
  const std::string partial = partial_path(parent, name);
  const std::string path = parent + "/" + std::string(name);
  // The rename alone would take the place of an empty folder.
  if (files.exists(path)) return Status::internal("cannot publish " + path + ": it is there already");
  if (Status s = files.sync_folder(partial); !s.ok()) return s;
  if (Status s = files.rename(partial, path); !s.ok()) return s;
  return files.sync_folder(parent);
}

Status remove_partials(FileSystem& files, const std::string& parent) {
  std::vector<std::string> names;
  Status first = files.list(parent, &names);
  for (const std::string& name : names) {
    if (!is_partial(name)) continue;
    Status removed = remove_tree(files, parent + "/" + name);
    if (first.ok()) first = std::move(removed);
  }
  return first;
}

}  // namespace holdfast
