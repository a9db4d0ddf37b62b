// report.json. What is made here is checked before it is given away, so that whatever make_incident_report()
// gives, validate_incident_report() takes.
#include "holdfast/coord/evidence/incident_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "holdfast/collectives/record.h"
#include "holdfast/coord/evidence/evidence.pb.h"
#include "holdfast/coord/evidence/incident_registry.h"
#include "holdfast/coord/policy.h"
#include "holdfast/coord/policy.pb.h"
#include "holdfast/coord/storage/sha256.h"
#include "incident_contract.h"

namespace holdfast {
namespace {

using namespace incident_contract;
using Json = nlohmann::ordered_json;

Status outside(const std::string& why) { return Status::internal("no incident report: " + why); }
Status refused(const std::string& why) { return Status::usage("incident report refused: " + why); }

std::string recorded(std::string_view bytes) {
  return bytes.empty() ? std::string(kNotRecorded) : text_of(bytes);
}

std::optional<std::string> if_there(bool there, std::string_view bytes) {
  if (!there || bytes.empty()) return std::nullopt;
  return text_of(bytes);
}

void add(std::uint64_t more, std::uint64_t* to) {
  // No sum that wraps can pass for a small one: what is at the end of the range is above every cap.
  if (__builtin_add_overflow(*to, more, to)) *to = std::numeric_limits<std::uint64_t>::max();
}

const EvidencePart* part_of(const BundleManifest& manifest, int rank) {
  const auto found = std::ranges::find(manifest.parts(), rank, &EvidencePart::rank);
  return found == manifest.parts().end() ? nullptr : &*found;
}

// The rank whose measurements the report is made of: the first origin that sent some.
const EvidencePart* witness(const BundleManifest& manifest) {
  for (const IncidentOrigin& origin : manifest.origins()) {
    const EvidencePart* part = part_of(manifest, origin.rank());
    if (part != nullptr && part->stages_size() > 0) return part;
  }
  if (manifest.origins_size() > 0) return nullptr;
  const auto any = std::ranges::find_if(manifest.parts(), [](const auto& p) { return p.stages_size() > 0; });
  return any == manifest.parts().end() ? nullptr : &*any;
}

// Owners of the stages are the policy's, which the manifest has as it was printed at start.
std::string owner_of(const BundleManifest& manifest, const Policy& policy, std::string_view stage) {
  Stage seen = Stage::kInput;
  const bool known = manifest.has_stage() && manifest.stage() >= 0 && manifest.stage() < kStageCount;
  if (known) seen = static_cast<Stage>(manifest.stage());
  if (known && stage_of_report(stage_name(seen)) == stage && !manifest.stage_owner().empty()) {
    return text_of(manifest.stage_owner());
  }
  const Policy::StageOwners& owners = policy.stage_owners();
  const std::string& own = stage == "input"      ? owners.input()
                           : stage == "forward"  ? owners.forward()
                           : stage == "loss"     ? owners.loss()
                           : stage == "backward" ? owners.backward()
                                                 : owners.optimizer();
  return recorded(!own.empty() ? own : !manifest.owner().empty() ? manifest.owner() : policy.owner());
}

// The wider of two: the one that holds the other's values.
void widen(const std::string& dtype, std::optional<std::string>* to) {
  if (dtype.empty()) return;
  const DtypeRule* const one = find_dtype(dtype);
  const DtypeRule* const other = *to ? find_dtype(**to) : nullptr;
  if (!*to || one == nullptr || (other != nullptr && one->largest > other->largest)) *to = text_of(dtype);
}

void add_total(const StageTotal& total, StageReport* stage) {
  add(total.tensors(), &stage->observations);
  add(total.elements(), &stage->total);
  add(total.nan(), &stage->nan);
  add(total.pos_inf(), &stage->pos_inf);
  add(total.neg_inf(), &stage->neg_inf);
  stage->finite_abs_max = std::max(stage->finite_abs_max.value_or(0), total.abs_max());
  stage->scaled = stage->scaled || total.scaled();
  widen(total.dtype(), &stage->dtype);
  for (const std::string& name : total.names()) {
    if (!name.empty()) stage->names.push_back(text_of(name));
  }
}

std::string_view probe_source(const BundleManifest& manifest, std::size_t stage, bool local, bool reduced) {
  const auto& sources = kStageRules[stage].probe_sources;
  if (kStageRules[stage].name == "backward") return sources[local && reduced ? 2 : reduced ? 1 : 0];
  if (kStageRules[stage].name == "optimizer") return sources[manifest.kind() == "UPDATE_FAILED" ? 1 : 0];
  return sources[0];
}

// Of all that `part` observed at this stage; false for more bad values than values.
bool measure(const BundleManifest& manifest, const EvidencePart& part, std::size_t at, StageReport* stage) {
  bool local = false;
  bool reduced = false;
  for (const StageTotal& total : part.stages()) {
    if (total.stage() < 0 || total.stage() >= kStageCount || total.tensors() == 0) continue;
    const std::string_view name = stage_name(static_cast<Stage>(total.stage()));
    if (stage_of_report(name) != stage->name) continue;
    (name == "reduction" ? reduced : local) = true;
    add_total(total, stage);
  }
  stage->nonfinite = stage->nan;
  add(stage->pos_inf, &stage->nonfinite);
  add(stage->neg_inf, &stage->nonfinite);
  if (stage->nonfinite > stage->total) return false;
  stage->finite = stage->total - stage->nonfinite;
  if (stage->finite == 0) stage->finite_abs_max.reset();
  stage->probe_source = local || reduced ? probe_source(manifest, at, local, reduced) : kNone;
  std::ranges::sort(stage->names);
  stage->names.erase(std::unique(stage->names.begin(), stage->names.end()), stage->names.end());
  if (stage->names.size() > kMostNames) stage->names.resize(kMostNames);
  return true;
}

Status make_stages(const BundleManifest& manifest, const EvidencePart& part, Report* report) {
  Policy policy;
  // One that cannot be read names no owners; the report is worth having all the same.
  if (!parse_policy(manifest.policy(), &policy).ok()) policy.Clear();
  std::size_t ran = 0;  // up to here
  std::size_t dirty = kStages;
  for (std::size_t i = 0; i < kStages; ++i) {
    StageReport& stage = report->stages.emplace_back();
    stage.name = kStageRules[i].name;
    stage.owner = owner_of(manifest, policy, stage.name);
    if (!measure(manifest, part, i, &stage)) {
      return outside(
          fmt::format("rank {} counts more non-finite values than values at {}", part.rank(), stage.name));
    }
    if (stage.observations > 0) ran = i;
    if (stage.nonfinite > 0) dirty = std::min(dirty, i);
  }
  for (std::size_t i = 0; i < kStages; ++i) {
    StageReport& stage = report->stages[i];
    stage.status = i > ran && i > dirty ? kNotRun : kObserved;
    stage.tensor_set_id = tensor_set_id(stage);
    stage.telemetry_id = telemetry_id(*report, stage);
  }
  return Status();
}

const Named* find_named(const BundleManifest& manifest, std::string_view name) {
  const auto found = std::ranges::find(manifest.configuration(), name, &Named::name);
  return found == manifest.configuration().end() || found->value().empty() ? nullptr : &*found;
}

// What the rank was fed with: by what the trainer says of it, and by the digests of its tensors.
Binding batch_of(const EvidencePart& part) {
  std::string all;
  const auto put = [&](std::string_view text) { all += fmt::format("{}:{};", text.size(), text); };
  for (const Named& fact : part.facts()) {
    put(fact.name());
    put(fact.value());
  }
  int tensors = 0;
  for (const EvidenceTensor& tensor : part.tensors()) {
    if (tensor.role() != EvidenceTensor::BATCH || !tensor.has_digest_high()) continue;
    ++tensors;
    put(tensor.name());
    put(fmt::format("{}:{:016x}{:016x}", tensor.micro_batch(), tensor.digest_high(), tensor.digest_low()));
  }
  if (all.empty()) return {};
  return {fmt::format("rank {}: {} facts, {} tensors", part.rank(), part.facts_size(), tensors),
          std::string(kDigestPrefix) + hex(sha256(all))};
}

void make_bindings(const BundleManifest& manifest, const EvidencePart& part, Report* report) {
  for (std::size_t i = 0; i < kBindings.size(); ++i) {
    if (const Named* named = find_named(manifest, kBindings[i])) {
      report->bindings[i] = {text_of(named->value()),
                             std::string(kDigestPrefix) + hex(sha256(named->value()))};
    } else if (kBindings[i] == "batch") {
      report->bindings[i] = batch_of(part);
    }
  }
  report->loss_scale_identity = manifest.loss_scale() == 1 ? "not scaled" : "scaled before backward";
  report->loss_scale = manifest.loss_scale();
  const std::string version = manifest.library().empty() ? "" : " " + manifest.library();
  report->probe_sources = {text_of("holdfast" + version), probe_sources_digest(*report)};
}

void make_boundary(const BundleManifest& manifest, const EvidencePart& part, Report* report) {
  const auto origin = std::ranges::find(manifest.origins(), part.rank(), &IncidentOrigin::rank);
  if (origin == manifest.origins().end()) return;
  const int stage = origin->stage();
  report->boundary = {
      .stage = stage < 0 || stage >= kStageCount ? "" : std::string(stage_name(static_cast<Stage>(stage))),
      .rank = static_cast<std::uint64_t>(origin->rank()),
      .host = recorded(origin->host()),
      .device = recorded(origin->device()),
      .tensor = recorded(origin->tensor()),
      .index = origin->index(),
      .last_clean = if_there(part.has_last_clean(), part.last_clean()),
      .first_dirty = if_there(part.has_first_dirty(), part.first_dirty())};
}

// Of the incidents that the contract does not speak of.
Status check_inside(const BundleManifest& manifest) {
  const bool nonfinite = manifest.nan() > 0 || manifest.pos_inf() > 0 || manifest.neg_inf() > 0;
  const bool of_values = manifest.kind() != "DIVERGED" && (nonfinite || manifest.kind() == "REQUESTED");
  if (!of_values) {
    return outside(fmt::format("{} without a non-finite value is outside of {}",
                               manifest.kind().empty() ? "an incident" : text_of(manifest.kind()), kVersion));
  }
  if (nonfinite && !manifest.has_stage()) return outside("non-finite values of no stage");
  if (manifest.run().empty() || !is_text(manifest.run()))
    return outside("the run has no id that can be shown");
  return Status();
}

Status check_text(const std::string& text, Json* json, Report* report) {
  if (const std::string fault = parse_strict_json(text, json); !fault.empty()) return refused("it " + fault);
  if (const std::string fault = from_json(*json, report); !fault.empty()) return refused(fault);
  if (const std::string fault = fault_of(*report); !fault.empty()) return refused(fault);
  if (report->report_id != report_id(*json)) {
    return refused("report_content_id is not that of the report: it was changed");
  }
  return Status();
}

}  // namespace

Status make_incident_report(const BundleManifest& manifest, const std::string& content_id, Json* report) {
  *report = nullptr;
  if (Status s = check_inside(manifest); !s.ok()) return s;
  const EvidencePart* const part = witness(manifest);
  if (part == nullptr) return outside("no origin sent what it measured");
  Report made;
  made.contract_version = kVersion;
  made.contract_id = kContractId;
  made.run = manifest.run();
  made.epoch = manifest.epoch();
  made.attempt = manifest.attempt();
  made.update = manifest.update();
  made.evidence_id = evidence_id(made.run, made.epoch, made.attempt);
  made.evidence_content_id = content_id;
  made.decision = manifest.action() == "SKIP" && manifest.exit_code() == 0 ? kContinue : kHold;
  const bool staged = manifest.has_stage() && manifest.stage() >= 0 && manifest.stage() < kStageCount;
  made.earliest = staged && manifest.kind() != "REQUESTED"
                      ? stage_of_report(stage_name(static_cast<Stage>(manifest.stage())))
                      : kNone;
  made.action = action_of(made.earliest);
  made.root_cause_claim = kRootCauseClaim;
  if (Status s = make_stages(manifest, *part, &made); !s.ok()) return s;
  make_bindings(manifest, *part, &made);
  make_boundary(manifest, *part, &made);
  made.report_id = report_id(to_json(made));

  Json json = to_json(made);
  Report again;
  std::string fault = from_json(json, &again);
  if (fault.empty()) fault = fault_of(again);
  if (!fault.empty()) return outside(fault);
  *report = std::move(json);
  return Status();
}

Status validate_incident_report(const std::string& text) {
  Json json;
  Report report;
  return check_text(text, &json, &report);
}

Status ValidatedIncident::validate(const std::string& text, ValidatedIncident* out) {
  *out = {};
  Json json;
  Report report;
  if (Status s = check_text(text, &json, &report); !s.ok()) return s;
  out->evidence_id_ = report.evidence_id;
  out->evidence_content_id_ = report.evidence_content_id;
  out->report_content_id_ = report.report_id;
  out->report_ = std::make_shared<const Json>(std::move(json));
  return Status();
}

Status ValidatedIncident::use(const Json** report) const {
  *report = nullptr;
  if (report_ == nullptr) return refused("none was validated");
  if (report_id(*report_) != report_content_id_) return refused("it was changed after it was validated");
  *report = report_.get();
  return Status();
}

Status IncidentRegistry::admit(const std::string& text, ValidatedIncident* out) {
  ValidatedIncident incident;
  *out = {};
  if (Status s = ValidatedIncident::validate(text, &incident); !s.ok()) return s;
  const auto known = known_.find(incident.evidence_id());
  if (known == known_.end() && known_.size() >= most_) {
    return refused(fmt::format("{} incidents are known already, and no more are kept in mind", most_));
  }
  const Ids ids = {incident.evidence_content_id(), incident.report_content_id()};
  if (known != known_.end() && known->second.evidence != ids.evidence) {
    return refused("evidence_id is known, with another evidence_content_id");
  }
  if (known != known_.end() && known->second.report != ids.report) {
    return refused("evidence_id is known, with another report_content_id");
  }
  known_.emplace(incident.evidence_id(), ids);
  *out = std::move(incident);
  return Status();
}

}  // namespace holdfast
