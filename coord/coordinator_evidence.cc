// Rank 0's part in evidence: what is wanted of whom, and where it goes.
#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "holdfast/coord/coordinator.h"
#include "holdfast/coord/cross_examination.h"
#include "holdfast/coord/decide.h"
#include "holdfast/coord/evidence/evidence.pb.h"
#include "holdfast/coord/evidence/evidence_store.h"
#include "holdfast/coord/policy.h"
#include "holdfast/coord/policy.pb.h"
#include "holdfast/coord/printable.h"
#include "holdfast/coord/rollback.h"
#include "holdfast/coord/state.pb.h"
#include "incident_json.h"
#include "layer_log.h"

namespace holdfast {
namespace {

using Json = nlohmann::ordered_json;

// Of a model of 200 layers, fifty attempts after each of some sixty incidents.
constexpr std::uint64_t kMostLayersBytes = std::uint64_t{256} << 20;

const char* kind_name(Verdict::Kind kind) {
  switch (kind) {
    case Verdict::Kind::kNonFinite: return "NON_FINITE";
    case Verdict::Kind::kError: return "ERROR";
    case Verdict::Kind::kUpdateFailed: return "UPDATE_FAILED";
    case Verdict::Kind::kDiverged: return "DIVERGED";
    case Verdict::Kind::kRequested: return "REQUESTED";
    default: return "";
  }
}

// The attempt's own making, unlike what the update before it did.
bool is_of_update(Verdict::Kind kind) {
  return kind == Verdict::Kind::kUpdateFailed || kind == Verdict::Kind::kDiverged;
}

// At most `most`, of distinct hosts first, in the order of ranks. `others`: how many more there are.
std::vector<int> choose_ranks(const Incident& incident, std::size_t most, std::size_t* others) {
  std::vector<std::pair<int, std::string>> candidates;
  for (const Origin& origin : incident.origins()) candidates.emplace_back(origin.rank, origin.host);
  if (candidates.empty()) {
    for (const RankView& view : incident.views) {
      if (view.error) candidates.emplace_back(view.rank, view.host);
    }
  }
  std::set<std::string> hosts;
  std::vector<int> chosen;
  std::vector<int> of_same_hosts;
  for (const auto& [rank, host] : candidates) {
    (hosts.insert(host).second ? chosen : of_same_hosts).push_back(rank);
  }
  chosen.insert(chosen.end(), of_same_hosts.begin(), of_same_hosts.end());
  chosen.resize(std::min(chosen.size(), most));
  *others = candidates.size() - chosen.size();
  std::ranges::sort(chosen);
  return chosen;
}

void put_named(const std::map<std::string, std::string>& values,
               google::protobuf::RepeatedPtrField<Named>* to) {
  for (const auto& [name, value] : values) {
    Named* named = to->Add();
    named->set_name(name);
    named->set_value(value);
  }
}

const std::string& owner_of(const Policy& policy, const std::optional<Stage>& stage) {
  return stage ? stage_owner(policy, *stage) : policy.owner();
}

}  // namespace

void Coordinator::keep_evidence(RunDescription description) {
  description_ = std::move(description);
  if (!keeps_record_ || evidence_) return;
  const Policy::Evidence& policy = policy_->evidence();
  const EvidenceOptions options{policy.full_incidents(), policy.bundle_quota_bytes(),
                                policy.run_quota_bytes(), policy.max_bundles()};
  const Status made =
      EvidenceStore::create(real_file_system(), folder_.path() + "/incidents", options, &evidence_);
  if (!made.ok()) tell_no_evidence(made.message());
}

void Coordinator::tell_no_evidence(const std::string& why) {
  record("evidence_failed", {{"epoch", memory_->epoch()}, {"attempt", memory_->attempt()}, {"reason", why}});
  std::fprintf(stderr, "holdfast: no evidence: %s; training goes on\n", printable(why).c_str());
}

std::optional<EvidenceOrder> Coordinator::order_evidence(const Incident& incident, const Decision& decision) {
  if (!evidence_ || incident.closing || decision.action == Action::kStop ||
      is_calibration(*policy_, incident)) {
    return std::nullopt;
  }
  if (kind_name(incident.verdict.kind)[0] == '\0') return std::nullopt;
  EvidenceOrder order;
  const std::uint64_t most_origins = policy_->evidence().max_full_origins();
  std::size_t others = 0;
  order.ranks = choose_ranks(incident, most_origins, &others);
  const TensorAllowance room = evidence_->next();
  order.full = room.bytes > 0;
  order.of_update = is_of_update(incident.verdict.kind);
  const std::vector<Origin> origins = incident.origins();
  if (!origins.empty()) {
    const Finding& finding = origins.front().finding;
    order.stage = finding.stage;
    order.tensor = finding.tensor;
    order.index = static_cast<std::int64_t>(finding.index);
    order.micro_batch = finding.micro_batch;
  } else if (incident.stage()) {
    order.stage = *incident.stage();
  }
  order.from_all = order.stage == Stage::kReduction && !order.of_update;
  if (order.full) {
    order.state_bytes = room.bytes / 2;
    order.bytes = room.bytes / 2 / std::max<std::size_t>(order.ranks.size(), 1);
  }
  about_ = std::make_unique<BundleManifest>();
  describe(incident, decision, about_.get());
  if (!order.full) {
    about_->set_compact(true);
    Omitted* omitted = about_->add_omitted();
    omitted->set_what("all tensors");
    omitted->set_why(room.why);
  }
  if (others > 0) {
    Omitted* omitted = about_->add_omitted();
    omitted->set_what(fmt::format("evidence of {} more origin{}", others, others == 1 ? "" : "s"));
    omitted->set_why(fmt::format("max_full_origins: {}", most_origins));
  }
  order_examination(incident, &order);
  return order;
}

// Of what an attempt makes of its batch on one rank alone; a sum and an update are the same on every rank.
void Coordinator::order_examination(const Incident& incident, EvidenceOrder* order) {
  examines_ = false;
  const std::vector<Origin> origins = incident.origins();
  if (!policy_->evidence().cross_examine() || !order->full || origins.empty() ||
      incident.verdict.kind != Verdict::Kind::kNonFinite || order->stage > Stage::kBackward) {
    return;
  }
  const int origin = origins.front().rank;
  const int examiner = choose_examiner(topology_, incident, origin);
  CrossExamination* about = about_->mutable_cross_examination();
  describe_examination(topology_, origin, examiner, about);
  about->set_outcome(CrossExamination::NOT_EXAMINED);
  if (examiner < 0) {
    about->set_why("there is no other rank with the same parameters");
  } else if (!description_.cross_examines) {
    about->set_why("the trainer has not said how another rank's attempt is made again");
  } else {
    about->set_why("the ranks' evidence did not arrive");
    examines_ = true;
    order->examined = origin;
    order->examiner = examiner;
    order->examined_bytes = std::min<std::uint64_t>(order->bytes, policy_->evidence().cross_examine_bytes());
  }
}

void Coordinator::describe(const Incident& incident, const Decision& decision, BundleManifest* about) const {
  about->set_epoch(incident.epoch);
  about->set_attempt(incident.attempt);
  about->set_update(incident.update);
  about->set_ranks(topology_.placements().size());
  about->set_time(utc_time());
  about->set_library(HOLDFAST_VERSION);
  about->set_run(memory_->run_id());
  about->set_kind(kind_name(incident.verdict.kind));
  const auto stage = incident.stage();
  if (stage) about->set_stage(static_cast<int>(*stage));
  const BadCounts counts = incident.counts();
  about->set_nan(counts.nan);
  about->set_pos_inf(counts.pos_inf);
  about->set_neg_inf(counts.neg_inf);
  for (const Origin& origin : incident.origins()) {
    IncidentOrigin* to = about->add_origins();
    to->set_rank(origin.rank);
    to->set_host(origin.host);
    to->set_stage(static_cast<int>(origin.finding.stage));
    to->set_tensor(origin.finding.tensor);
    to->set_index(origin.finding.index);
    to->set_nan(origin.counts.nan);
    to->set_pos_inf(origin.counts.pos_inf);
    to->set_neg_inf(origin.counts.neg_inf);
    to->set_micro_batch(origin.finding.micro_batch);
    if (const RankPlacement* place = topology_.find(origin.rank)) {
      to->set_device(place->device());
      to->set_hardware_suspect(suspects_.is_suspect(place->device()));
    }
    if (about->origins_size() >= static_cast<int>(kMostOriginsKept)) break;
  }
  if (const RankView* view = incident.first_error()) about->set_error(view->error->what);
  about->set_action(std::string(action_name(decision.action)));
  about->set_exit_code(decision.exit_code());
  about->set_reason(decision.reason);
  for (const RankView& view : incident.views) {
    if (!view.has_loss) continue;
    about->set_loss(view.loss);
    break;
  }
  if (incident.loss_scale) about->set_loss_scale(incident.loss_scale->scale);
  put_named(description_.configuration, about->mutable_configuration());
  put_named(description_.environment, about->mutable_environment());
  about->set_policy(policy_text(*policy_));
  about->set_topology(topology_.map());
  for (const std::string& fault : description_.injected) about->add_injected(fault);
  if (const auto before = newest_before(generations_, incident.attempt + 1)) {
    about->set_generation(before->name());
    if (const auto known = manifests_.find(*before); known != manifests_.end() && !known->second.empty())
      about->set_generation_sha256(known->second);
    about->set_attempts_since_generation(incident.attempt - before->attempt);
  }
  about->set_owner(policy_->owner());
  about->set_ticket(policy_->ticket());
  about->set_stage_owner(owner_of(*policy_, stage));
}

// An incident that another device reproduces is taken back from the device that was counted as its only
// origin.
void Coordinator::finish_examination(const std::vector<EvidencePart>& parts,
                                     const EvidencePart* examination) {
  CrossExamination* about = about_->mutable_cross_examination();
  const auto origin = std::ranges::find(parts, about->origin(), &EvidencePart::rank);
  about->clear_why();
  judge_examination(origin == parts.end() ? nullptr : &*origin, examination, about);
  const auto same_device = [&](const IncidentOrigin& o) { return o.device() == about->origin_device(); };
  if (about->outcome() == CrossExamination::DATA_OR_MODEL &&
      std::ranges::all_of(about_->origins(), same_device)) {
    suspects_.take_back(about->origin_device());
    for (IncidentOrigin& o : *about_->mutable_origins())
      o.set_hardware_suspect(suspects_.is_suspect(o.device()));
    write_memory();
  }
  Json fields = place_json(about_->epoch(), about_->attempt(), about_->update());
  fields["bundle"] = GenerationId{about_->epoch(), about_->attempt()}.name();
  fields["outcome"] = CrossExamination::Outcome_Name(about->outcome());
  if (about->has_why()) fields["reason"] = about->why();
  fields["origin"] = {
      {"rank", about->origin()},
      {"host", about->origin_host()},
      {"device", about->origin_device()},
      {"found_again", about->has_origin_found() ? Json(about->origin_found()) : Json(nullptr)},
      {"hardware_suspect", suspects_.is_suspect(about->origin_device())}};
  fields["examiner"] = {
      {"rank", about->examiner()},
      {"host", about->examiner_host()},
      {"device", about->examiner_device()},
      {"where", CrossExamination::Where_Name(about->where())},
      {"found_again", about->has_examiner_found() ? Json(about->examiner_found()) : Json(nullptr)}};
  record("evidence_cross_examined", std::move(fields));
}

void Coordinator::submit_evidence(std::vector<EvidencePart> parts, const EvidencePart* examination) {
  if (!evidence_ || !about_) return;
  if (examines_) finish_examination(parts, examination);
  evidence_->submit(std::move(*about_), std::move(parts));
  about_.reset();
}

void Coordinator::report_evidence() {
  if (!evidence_) return;
  for (const BundleOutcome& outcome : evidence_->take_outcomes()) {
    Json fields = {
        {"epoch", outcome.id.epoch}, {"attempt", outcome.id.attempt}, {"bundle", outcome.id.name()}};
    if (!outcome.published) {
      metrics_.count_failed_bundle();
      fields["reason"] = outcome.reason;
      record("evidence_failed", std::move(fields));
      std::fprintf(stderr, "holdfast: no evidence of %s: %s; training goes on\n", outcome.id.name().c_str(),
                   printable(outcome.reason).c_str());
      continue;
    }
    metrics_.count_bundle();
    fields["content_id"] = outcome.content_id;
    fields["compact"] = outcome.compact;
    fields["bytes"] = outcome.bytes;
    fields["seconds"] = json_number(outcome.seconds);
    if (!outcome.reason.empty()) fields["left_out"] = outcome.reason;
    record("evidence_written", std::move(fields));
  }
}

void Coordinator::keep_layers(const LayerAttempt& attempt) {
  if (!keeps_record_ || taken_over()) return;
  Status status;
  if (!layers_) {
    layers_ = std::make_unique<LayerLog>();
    status = layers_->open(folder_.layers_path(), kMostLayersBytes);
  } else if (layers_->closed()) {
    return;  // said when it was
  }
  if (status.ok()) status = layers_->append(attempt);
  if (status.ok()) return;
  Json fields = place_json(memory_->epoch(), memory_->attempt(), memory_->update());
  fields["reason"] = status.message();
  record("layers_not_written", std::move(fields));
}

void Coordinator::finish_evidence() {
  if (!evidence_) return;
  const auto most =
      std::chrono::milliseconds(static_cast<std::int64_t>(policy_->evidence().deadline_seconds() * 1000));
  if (evidence_->wait_for(most)) return report_evidence();
  tell_no_evidence("it was not on disk in time");
  // Its destructor would wait for a disk that hangs, and the process is about to end.
  static_cast<void>(evidence_.release());
}

}  // namespace holdfast
