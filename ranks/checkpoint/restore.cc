#include "restore.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <deque>

#include "generation_loader.h"
#include "holdfast/coord/printable.h"

namespace holdfast {
namespace {

constexpr std::size_t kMostCandidates = 64;

// Of something that another generation may do without.
Status unusable(const std::string& why) { return {StatusCode::kNoCleanGeneration, why}; }
bool is_unusable(const Status& status) { return status.code() == StatusCode::kNoCleanGeneration; }

class Restorer {
 public:
  Restorer(const RestoreFrom& from, RestoredGeneration* out) : from_(from), out_(out) {}

  Status run(const std::optional<GenerationId>& at_most);

 private:
  bool is_rank_0() const { return from_.collective.rank() == 0; }

  // On rank 0.
  Status list(const std::optional<GenerationId>& at_most);
  Bytes next_turn();
  Status examine(const GenerationId& id);
  void judge(const GenerationId& id, const std::string& why);
  void set_aside(const GenerationId& id, const std::string& why);

  // Collective.
  Status attempt(const GenerationId& id, const std::string& digest);
  Status see(const GenerationId& id, const std::string& digest);
  Status match() const;

  const RestoreFrom& from_;
  RestoredGeneration* const out_;
  std::deque<GenerationId> candidates_;  // on rank 0, newest first
  Manifest manifest_;                    // of the candidate
  ShardedArrays arrays_;                 // on rank 0, of the same
};

// What rank 0 tells the others: "e0001-a0000000600", its manifest's digest behind it; or "" and why there is
// no other.
constexpr char kTurnEnd = '\n';

Status Restorer::run(const std::optional<GenerationId>& at_most) {
  *out_ = RestoredGeneration();
  if (Status s = agree_on_status(from_.collective, is_rank_0() ? list(at_most) : Status()); !s.ok()) return s;
  for (;;) {
    Bytes turn = is_rank_0() ? next_turn() : Bytes();
    if (Status s = from_.collective.broadcast(&turn); !s.ok()) return s;
    const auto end = turn.find(kTurnEnd);
    if (end == Bytes::npos) return Status::internal("malformed turn of a restore");
    const std::string rest = turn.substr(end + 1);
    if (end == 0) return unusable(rest);
    GenerationId id;
    if (!parse_generation_name(turn.substr(0, end), &id))
      return Status::internal("malformed turn of a restore");
    const Status done = attempt(id, rest);
    if (!is_unusable(done)) return done;
    if (is_rank_0()) judge(id, done.message());
  }
}

Status Restorer::list(const std::optional<GenerationId>& at_most) {
  if (Status s = from_.folder.refresh(); !s.ok()) return s;
  for (const StoredGeneration& stored : from_.folder.stored()) {
    if (!at_most || stored.id <= *at_most) candidates_.push_front(stored.id);
  }
  if (candidates_.size() > kMostCandidates) candidates_.resize(kMostCandidates);
  return Status();
}

Bytes Restorer::next_turn() {
  while (!candidates_.empty()) {
    const GenerationId id = candidates_.front();
    candidates_.pop_front();
    if (Status s = examine(id); !s.ok()) {
      set_aside(id, s.message());
      continue;
    }
    return id.name() + kTurnEnd + manifest_sha256(manifest_);
  }
  const std::string where = printable(from_.folder.path());
  return kTurnEnd + (out_->refused.empty() ? "no generation to restore in " + where
                                           : fmt::format("no clean generation in {}: {}", where,
                                                         fmt::join(out_->refused, "; ")));
}

// What can be seen without reading the tensors: the manifest, and that all parts are there and no others.
Status Restorer::examine(const GenerationId& id) {
  if (Status s = read_manifest(from_.files, from_.folder.path(), id, &manifest_); !s.ok()) return s;
  arrays_ = ShardedArrays::of(manifest_);
  if (const std::string fault = arrays_.fault(); !fault.empty()) return Status::internal(fault);
  const GenerationReport report = inspect_generation(from_.files, from_.folder.path(), id);
  return report.faults.empty() ? Status() : Status::internal(report.faults.front());
}

void Restorer::judge(const GenerationId& id, const std::string& why) {
  const GenerationReport report = verify_generation(from_.files, from_.folder.path(), id);
  if (!report.clean()) {
    set_aside(id, report.faults.empty() ? why : report.faults.front());
    return;
  }
  out_->refused.push_back(
      fmt::format("{} passed over: {} (rank 0 finds it clean, so it stays)", id.name(), why));
}

void Restorer::set_aside(const GenerationId& id, const std::string& why) {
  std::string as;
  const Status moved = from_.folder.set_aside(id, &as);
  out_->refused.push_back(id.name() + " refused: " + why +
                          (as.empty() ? "" : "; set aside as " + printable(as)) +
                          (moved.ok() ? "" : "; setting it aside failed: " + moved.message()));
}

Status Restorer::attempt(const GenerationId& id, const std::string& digest) {
  Collective& collective = from_.collective;
  if (Status s = agree_on_status(collective, see(id, digest)); !s.ok()) return s;
  if (Status s = agree_on_status(collective, match()); !s.ok()) {
    return {s.code(), id.name() + " is of another model or run: " + s.message()};
  }
  const std::string folder = generation_path(from_.folder.path(), id);
  GenerationLoader loader(from_.files, folder, manifest_, from_.state, {collective.rank(), from_.groups});
  const Status read = loader.read();
  if (Status s = agree_on_status(collective, read.ok() ? read : unusable(read.message())); !s.ok()) return s;
  // No bytes are handed out before every rank has all of its tensors.
  if (Status s = agree_on_status(collective, loader.load_bytes()); !s.ok()) {
    return {s.code(), id.name() + ": " + s.message()};
  }
  out_->position = {manifest_.epoch(), manifest_.attempt(), manifest_.update(), manifest_.skips()};
  out_->ranks = manifest_.ranks();
  out_->manifest_sha256 = digest;
  if (is_rank_0()) out_->memory = manifest_.memory();
  return Status();
}

Status Restorer::see(const GenerationId& id, const std::string& digest) {
  if (is_rank_0()) return Status();  // as examined
  const Status read = read_manifest(from_.files, from_.folder.path(), id, &manifest_);
  if (!read.ok()) return unusable(read.message());
  return manifest_sha256(manifest_) == digest ? Status() : unusable("the manifest is another than rank 0's");
}

Status Restorer::match() const {
  const Collective& collective = from_.collective;
  if (Status s = check_match(from_.declared, manifest_, {collective.rank(), from_.groups}); !s.ok()) return s;
  if (collective.rank() != 0) return Status();
  const std::string why = from_.ranks.arrays.difference(arrays_, "this run's state", "the generation");
  return why.empty() ? Status() : Status::usage(why);
}

}  // namespace

Status restore_newest(const RestoreFrom& from, const std::optional<GenerationId>& at_most,
                      RestoredGeneration* out) {
  return Restorer(from, out).run(at_most);
}

}  // namespace holdfast
