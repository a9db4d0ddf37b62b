#include "replay_bundle.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "checkpoint/part_file.h"
#include "holdfast/checkpoint/generation.h"
#include "holdfast/checkpoint/manifest.pb.h"
#include "holdfast/coord/evidence/evidence.pb.h"
#include "holdfast/coord/printable.h"

namespace holdfast {
namespace {

template <typename Values>
std::map<std::string, std::string> named(const Values& values) {
  std::map<std::string, std::string> all;
  for (const Named& value : values) all.emplace(value.name(), value.value());
  return all;
}

// "" or why it cannot be had.
std::string read_recorded(const Bundle& bundle, const EvidenceTensor& tensor, RecordedTensor* to) {
  to->name = tensor.name();
  to->micro_batch = tensor.micro_batch();
  if (!parse_stored_dtype(tensor.dtype(), &to->dtype)) {
    return fmt::format("{} is of the unknown type {}", printable(tensor.name()), printable(tensor.dtype()));
  }
  for (const std::uint64_t extent : tensor.shape()) {
    if (extent > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()))
      return printable(tensor.name()) + " has an extent that is too large";
    to->shape.push_back(static_cast<std::int64_t>(extent));
  }
  const Status read = bundle.read(tensor, &to->bytes);
  return read.ok() ? "" : read.message();
}

std::string parent_of(std::string path) {
  while (path.size() > 1 && path.ends_with('/')) path.pop_back();
  const auto slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

}  // namespace

std::string ReplayBundle::open() {
  attempt_ = {};
  if (Status s = Bundle::open(files_, path_, &bundle_); !s.ok()) return s.message();
  if (const auto faults = bundle_->verify(); !faults.empty()) return "it is damaged: " + faults.front();
  const BundleManifest& manifest = bundle_->manifest();
  if (manifest.kind() != "NON_FINITE" && manifest.kind() != "ERROR") return why_not_the_attempt();
  if (std::string missing = find_origin(); !missing.empty()) return missing;
  if (std::string missing = find_boundary(); !missing.empty()) return missing;
  attempt_.rank = origin_->rank();
  attempt_.ranks = manifest.ranks();
  attempt_.replicas = origin_->has_replicas() ? origin_->replicas() : manifest.ranks();
  attempt_.loss_scale = manifest.loss_scale();
  attempt_.configuration = named(manifest.configuration());
  for (const EvidencePart& part : manifest.parts()) {
    if (part.replica_group() == origin_->replica_group())
      attempt_.facts.emplace(part.rank(), named(part.facts()));
  }
  environment_ = named(manifest.environment());
  return read_tensors();
}

std::string ReplayBundle::why_not_the_attempt() const {
  const BundleManifest& manifest = bundle_->manifest();
  std::string why = "what went wrong is the state and not the attempt (" + printable(manifest.kind()) + ")";
  if (manifest.has_generation()) {
    why += fmt::format("; the state before it is in checkpoint {}, {} attempts earlier",
                       printable(manifest.generation()), manifest.attempts_since_generation());
  }
  return why;
}

std::string ReplayBundle::find_origin() {
  const auto& parts = bundle_->manifest().parts();
  const auto found = std::ranges::find_if(parts, [](const EvidencePart& part) { return part.is_origin(); });
  if (found == parts.end()) return "no origin rank contributed anything";
  origin_ = &*found;
  return "";
}

std::string ReplayBundle::find_boundary() {
  const BundleManifest& manifest = bundle_->manifest();
  EvidenceSubject& subject = attempt_.subject;
  subject.epoch = manifest.epoch();
  subject.attempt = manifest.attempt();
  subject.stage = static_cast<Stage>(manifest.stage());
  if (manifest.origins_size() > 0) {
    const IncidentOrigin& first = manifest.origins(0);
    subject.stage = static_cast<Stage>(first.stage());
    subject.tensor = first.tensor();
    subject.index = static_cast<std::int64_t>(first.index());
    subject.micro_batch = first.micro_batch();
  }
  // Of an exception on another rank this one has no part: what it saw itself is what it makes again.
  for (const IncidentOrigin& origin : manifest.origins()) {
    if (origin.rank() != origin_->rank()) continue;
    boundary_ = {static_cast<Stage>(origin.stage()),
                 origin.tensor(),
                 static_cast<std::int64_t>(origin.index()),
                 {origin.nan(), origin.pos_inf(), origin.neg_inf()},
                 ""};
    return "";
  }
  if (manifest.kind() != "ERROR") return "where it was first seen";
  boundary_ = {static_cast<Stage>(manifest.stage()), "", -1, {}, manifest.error()};
  return manifest.error().empty() ? "what the exception said" : "";
}

std::string ReplayBundle::read_tensors() {
  for (const EvidenceTensor& tensor : origin_->tensors()) {
    if (tensor.role() != EvidenceTensor::BATCH && tensor.role() != EvidenceTensor::SEEN) continue;
    auto& to = tensor.role() == EvidenceTensor::BATCH ? attempt_.batch : attempt_.seen;
    if (std::string why = read_recorded(*bundle_, tensor, &to.emplace_back()); !why.empty()) return why;
  }
  for (const Omitted& omitted : origin_->omitted()) attempt_.left_out.push_back(omitted.what());
  return "";
}

std::string ReplayBundle::missing_batch() const {
  if (!attempt_.batch.empty()) return "";
  std::string missing = "the batch of rank " + std::to_string(attempt_.rank);
  if (bundle_->manifest().compact()) missing += " (the bundle is compact: it holds no tensors)";
  return missing;
}

// ---- the state before the attempt

std::string not_of_rank(const std::string& name, int rank) {
  return fmt::format("{} as rank {} had it: a bundle holds what rank 0 has", printable(name), rank);
}

std::string ReplayBundle::read_state(const std::vector<std::string>& needed) {
  const auto lacking = [&]() -> const std::string* {
    for (const std::string& name : needed) {
      if (!state_.contains(name)) return &name;
    }
    return nullptr;
  };
  if (state_source_.empty()) {
    const std::string other = why_not_the_bundle();
    const std::string why = other.empty() ? read_bundled_state() : read_checkpoint();
    if (!why.empty()) return other.empty() ? why : other + "; " + why;
  }
  const std::string* missing = lacking();
  if (missing == nullptr) return "";
  const std::string name = *missing;
  const std::string why = read_checkpoint();
  if (why.empty() && lacking() == nullptr) return "";
  if (!why.empty() && of_rank_0_.contains(name))
    return fmt::format("{}; {}", not_of_rank(name, attempt_.rank), why);
  return "the state before the attempt (" + printable(why.empty() ? *lacking() : name) + ")" +
         (why.empty() ? "" : "; " + why);
}

const EvidencePart* ReplayBundle::find_part(int rank) const {
  const auto& parts = bundle_->manifest().parts();
  const auto found = std::ranges::find(parts, rank, &EvidencePart::rank);
  return found == parts.end() ? nullptr : &*found;
}

// With tensor parallelism the groups' tensors have the same names and shapes. "" when it is the origin's.
std::string ReplayBundle::why_not_the_bundle() const {
  const EvidencePart* rank_0 = find_part(0);
  if (rank_0 == nullptr || rank_0->replica_group() == origin_->replica_group()) return "";
  return fmt::format("the state before the attempt of replica group {}: the bundle has that of {}, rank 0's",
                     printable(origin_->replica_group()), printable(rank_0->replica_group()));
}

// All or nothing, so that the next call may try again.
std::string ReplayBundle::read_bundled_state() {
  const bool is_own = attempt_.rank == 0;
  std::map<std::string, RecordedTensor> state;
  const EvidencePart* rank_0 = find_part(0);
  for (int i = 0; rank_0 != nullptr && i < rank_0->tensors_size(); ++i) {
    const EvidenceTensor& tensor = rank_0->tensors(i);
    if (tensor.role() != EvidenceTensor::STATE || state.contains(tensor.name())) continue;
    if (!is_own && tensor.held() != static_cast<int>(Held::kReplicated)) {
      of_rank_0_.insert(tensor.name());
      continue;
    }
    if (std::string why = read_recorded(*bundle_, tensor, &state[tensor.name()]); !why.empty()) return why;
  }
  state_ = std::move(state);
  has_own_state_ = is_own;
  state_source_ = "bundle";
  return "";
}

// In place of what the bundle has. "", or why it cannot serve.
std::string ReplayBundle::read_checkpoint() {
  const BundleManifest& manifest = bundle_->manifest();
  GenerationId id;
  if (!manifest.has_generation()) return "the bundle names no checkpoint";
  const std::string name = printable(manifest.generation());
  if (manifest.attempts_since_generation() != 0) {
    return fmt::format("checkpoint {} of the run is {} attempts earlier", name,
                       manifest.attempts_since_generation());
  }
  if (!parse_generation_name(manifest.generation(), &id) || id.attempt != manifest.attempt())
    return fmt::format("{} is no checkpoint of this attempt", name);
  const std::string checkpoints = checkpoints_path(run_dir_.empty() ? parent_of(parent_of(path_)) : run_dir_);
  const std::string folder = generation_path(checkpoints, id);
  const std::string where = fmt::format("checkpoint {} of the run", name);
  if (!files_.exists(folder)) return fmt::format("{} is not in {}", where, printable(checkpoints));
  const GenerationReport report = verify_generation(files_, checkpoints, id);
  if (!report.clean())
    return fmt::format("{} is not clean: {}", where, report.faults.empty() ? "" : report.faults.front());
  Manifest generation;
  if (Status s = read_manifest(files_, checkpoints, id, &generation); !s.ok()) return s.message();
  if (manifest.has_generation_sha256() && manifest.generation_sha256() != manifest_sha256(generation))
    return fmt::format("{} is another than the one that the bundle names: its manifest's SHA-256 differs",
                       where);
  std::optional<std::uint32_t> group;
  const auto named = std::ranges::find(generation.groups(), origin_->replica_group());
  if (named != generation.groups().end())
    group = static_cast<std::uint32_t>(named - generation.groups().begin());
  for (const Part& part : generation.parts()) {
    if (part.has_group() && part.has_rank() && part.rank() == attempt_.rank) group = part.group();
  }
  if (generation.groups_size() > 0 && !group) {
    return fmt::format("{} has state of {} replica groups, and does not say of which rank {} is", where,
                       generation.groups_size(), attempt_.rank);
  }
  std::map<std::string, RecordedTensor> state;
  for (const Part& part : generation.parts()) {
    if (part.has_rank() && part.rank() != attempt_.rank) continue;
    if (part.has_group() && part.group() != group) continue;
    PartReader reader;
    if (Status s = reader.open(files_, folder, part); !s.ok()) return s.message();
    for (int i = 0; i < reader.tensors(); ++i) {
      const TensorEntry& entry = reader.tensor(i);
      RecordedTensor& to = state[entry.name()];
      to.name = entry.name();
      if (!parse_stored_dtype(entry.dtype(), &to.dtype))
        return printable(entry.name()) + " is of an unknown type";
      to.shape.assign(entry.shape().begin(), entry.shape().end());
      to.bytes.resize(entry.bytes());
      std::optional<NonFinite> finding;
      if (Status s = reader.read_tensor(i, std::as_writable_bytes(std::span(to.bytes)), &finding); !s.ok())
        return s.message();
    }
  }
  std::string source = id.name();
  state_ = std::move(state);
  state_source_ = std::move(source);
  has_own_state_ = true;
  return "";
}

}  // namespace holdfast
