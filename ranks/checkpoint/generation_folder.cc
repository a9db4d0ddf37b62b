#include "generation_folder.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "holdfast/coord/storage/publication.h"
#include "holdfast/coord/storage/sha256.h"

namespace holdfast {
namespace {

GenerationId id_of(const Manifest& manifest) { return {manifest.epoch(), manifest.attempt()}; }

// Whoever restores refuses what is over a limit, such as more tensors in all groups together than a manifest
// may hold: older generations must not go for such a one.
Status check_readable(const std::string& encoded) {
  Manifest again;
  const Status status = decode_manifest(encoded, &again);
  return status.ok() ? status : Status::internal("no restore would read it: " + status.message());
}

}  // namespace

Status GenerationFolder::open() {
  if (Status s = files_.create_folder(path_); !s.ok()) return s;
  const auto parent = std::filesystem::path(path_).parent_path();
  if (Status s = files_.sync_folder(parent.empty() ? "." : parent.string()); !s.ok()) return s;
  if (Status s = remove_partials(files_, path_); !s.ok()) return s;
  return refresh();
}

Status GenerationFolder::refresh() {
  std::vector<GenerationId> ids;
  if (Status s = list_generations(files_, path_, &ids); !s.ok()) return s;
  std::vector<StoredGeneration> stored;
  for (const GenerationId& id : ids) {
    stored.push_back({id, 0});
    // What of a damaged one cannot be looked at is left out: it is for a restore to judge it.
    (void)tree_bytes(files_, path_of(id), &stored.back().bytes);
  }
  const std::lock_guard lock(mutex_);
  stored_ = std::move(stored);
  return Status();
}

std::vector<StoredGeneration> GenerationFolder::stored() const {
  const std::lock_guard lock(mutex_);
  return stored_;
}

void GenerationFolder::publish(const Manifest& manifest, CheckpointOutcome* outcome) {
  const GenerationId id = id_of(manifest);
  std::erase(discarded_, id);
  sweep();  // all ranks are through with what they began before this one
  Status status = options_.before_publication ? options_.before_publication() : Status();
  if (status.ok()) status = write_and_publish(manifest, id, outcome);
  if (const Status& s = status; !s.ok()) {
    outcome->reason = id.name() + " refused: " + s.message();
    if (files_.exists(path_of(id))) {
      // Another's of that name, or ours that is only not known to be on disk: not one to remove older ones
      // for.
      if (Status listed = refresh(); !listed.ok()) outcome->reason += "; " + listed.message();
    }
    discard(id);
    return;
  }
  outcome->published = true;
  {
    const std::lock_guard lock(mutex_);
    stored_.push_back({id, outcome->bytes});
    std::ranges::sort(stored_, {}, &StoredGeneration::id);
  }
  retain(outcome);
}

Status GenerationFolder::write_and_publish(const Manifest& manifest, const GenerationId& id,
                                           CheckpointOutcome* outcome) {
  if (Status s = check_parts(manifest); !s.ok()) return s;
  const std::string encoded = encode_manifest(manifest);
  if (Status s = check_readable(encoded); !s.ok()) return s;
  outcome->manifest_sha256 = hex(sha256(encoded));
  outcome->bytes = encoded.size();
  for (const Part& part : manifest.parts()) outcome->bytes += part.file_bytes();
  if (const std::string why = quota_refusal(stored(), outcome->bytes, options_); !why.empty())
    return Status::internal(why);
  const std::string partial = partial_path(path_, id.name());
  if (Status s = write_synced(files_, partial + "/" + std::string(kManifestName), encoded); !s.ok()) return s;
  return holdfast::publish(files_, path_, id.name());
}

// A rank whose folder is not ours writes its part where nobody will look for it.
Status GenerationFolder::check_parts(const Manifest& manifest) const {
  const std::string partial = partial_path(path_, id_of(manifest).name());
  for (const Part& part : manifest.parts()) {
    std::unique_ptr<ReadableFile> file;
    if (Status s = files_.open_file(partial + "/" + part.file(), &file); !s.ok()) {
      return Status::internal(s.message() + "; is the folder on a file system that all hosts share?");
    }
    if (file->size() != part.file_bytes()) {
      return Status::internal(fmt::format("{}/{} has {} bytes where {} were written", partial, part.file(),
                                          file->size(), part.file_bytes()));
    }
  }
  return Status();
}

void GenerationFolder::retain(CheckpointOutcome* outcome) {
  for (const GenerationId& id : generations_to_remove(stored(), options_)) {
    if (Status s = remove(id); !s.ok()) {
      outcome->reason +=
          (outcome->reason.empty() ? "" : "; ") + ("cannot remove " + id.name() + ": " + s.message());
      continue;
    }
    outcome->removed.push_back(id.name());
  }
}

// By way of a partial name, so that whoever dies in between leaves nothing that could be taken for a
// generation.
Status GenerationFolder::remove(const GenerationId& id) {
  const std::string doomed = partial_path(path_, id.name());
  if (Status s = files_.rename(path_of(id), doomed); !s.ok()) return s;
  {
    const std::lock_guard lock(mutex_);
    std::erase_if(stored_, [&](const StoredGeneration& g) { return g.id == id; });
  }
  if (Status s = files_.sync_folder(path_); !s.ok()) {
    discarded_.push_back(id);
    return s;
  }
  Status removed = remove_tree(files_, doomed);
  if (!removed.ok()) discarded_.push_back(id);
  return removed;
}

void GenerationFolder::discard(const GenerationId& id) {
  const std::string partial = partial_path(path_, id.name());
  if (files_.exists(partial)) (void)remove_tree(files_, partial);
  discarded_.push_back(id);
}

void GenerationFolder::sweep() {
  std::erase_if(discarded_, [&](const GenerationId& id) {
    const std::string partial = partial_path(path_, id.name());
    return !files_.exists(partial) || remove_tree(files_, partial).ok();
  });
}

Status GenerationFolder::set_aside(const GenerationId& id, std::string* as) {
  const std::string folder = path_ + "/" + std::string(kSetAsideName);
  if (Status s = files_.create_folder(folder); !s.ok()) return s;
  std::string to = folder + "/" + id.name();
  for (int i = 2; files_.exists(to); ++i) to = folder + "/" + id.name() + "." + std::to_string(i);
  if (Status s = files_.rename(path_of(id), to); !s.ok()) return s;
  *as = to;
  {
    const std::lock_guard lock(mutex_);
    std::erase_if(stored_, [&](const StoredGeneration& g) { return g.id == id; });
  }
  if (Status s = files_.sync_folder(folder); !s.ok()) return s;
  return files_.sync_folder(path_);
}

}  // namespace holdfast
