// What a rank contributes to the evidence of an attempt that was not clean.
#include <algorithm>
#include <exception>

#include "checkpoint/part_file.h"
#include "guard_impl.h"
#include "holdfast/coord/evidence/evidence.pb.h"
#include "holdfast/evidence.h"
#include "holdfast/replay.h"
#include "run_environment.h"

namespace holdfast {
namespace {

void put_tallies(const AttemptLog& log, bool scales_loss, EvidencePart* part) {
  for (int s = 0; s < kStageCount; ++s) {
    const StageTally& tally = log.tally(static_cast<Stage>(s));
    if (tally.tensors == 0) continue;
    StageTotal* total = part->add_stages();
    total->set_stage(s);
    total->set_tensors(tally.tensors);
    total->set_elements(tally.elements);
    total->set_nan(tally.bad.nan);
    total->set_pos_inf(tally.bad.pos_inf);
    total->set_neg_inf(tally.bad.neg_inf);
    total->set_abs_max(tally.abs_max);
    if (tally.dtype) total->set_dtype(std::string(stored_dtype(*tally.dtype)));
    const Stage stage = static_cast<Stage>(s);
    total->set_scaled(scales_loss && (stage == Stage::kBackward || stage == Stage::kReduction));
    for (std::size_t i = 0; i < std::min<std::size_t>(tally.tensors, tally.names.size()); ++i) {
      total->add_names(tally.names[i]);
    }
  }
}

// With one group of all ranks there is nothing to tell.
void put_groups(const ReplicaGroups& groups, std::vector<EvidencePart>* parts) {
  if (groups.only_one()) return;
  for (EvidencePart& part : *parts) {
    if (part.rank() < 0 || part.rank() >= groups.ranks()) continue;
    const int group = groups.group_of(part.rank());
    part.set_replica_group(groups.name(group));
    part.set_replicas(static_cast<std::uint32_t>(groups.members(group).size()));
  }
}

// A provider's exception is put on record, and costs no more than what it had to say.
template <typename Call>
void call(EvidenceRecorder* recorder, Call&& provider) {
  try {
    provider();
  } catch (const std::exception& error) {
    recorder->failed(error.what());
  } catch (...) {
    recorder->failed("exception of unknown type");
  }
}

// What EvidenceRecorder wrote, as a trainer reads it. "", or what is wrong with it.
std::string unpack_batch(const EvidencePart& batch, RecordedAttempt* to) {
  for (const Named& fact : batch.facts()) to->facts[to->rank].emplace(fact.name(), fact.value());
  for (const EvidenceTensor& tensor : batch.tensors()) {
    RecordedTensor one;
    one.name = tensor.name();
    one.micro_batch = tensor.micro_batch();
    if (!parse_stored_dtype(tensor.dtype(), &one.dtype))
      return "tensor " + one.name + " is of an unknown type";
    one.shape.assign(tensor.shape().begin(), tensor.shape().end());
    one.bytes = tensor.data();
    (tensor.role() == EvidenceTensor::BATCH ? to->batch : to->seen).push_back(std::move(one));
  }
  return "";
}

}  // namespace

void StepGuard::Impl::provide_evidence(EvidenceProviders providers) {
  providers_ = std::move(providers);
  if (!coordinator_) return;
  coordinator_->keep_evidence({providers_.configuration, describe_environment(providers_.environment),
                               providers_.injected, providers_.rerun && providers_.rerun_recorded});
}

// A sum goes over the ranks of one group: others may not even have the tensor. The first origin is the lowest
// of those that were chosen.
EvidenceOrder StepGuard::Impl::for_this_rank(EvidenceOrder order) const {
  const int first = order.ranks.empty() ? 0 : order.ranks.front();
  const bool is_known = first >= 0 && first < groups_.ranks();
  order.from_all =
      order.from_all && is_known && groups_.group_of(first) == groups_.group_of(collective_.rank());
  return order;
}

// Collective, when evidence is wanted: each rank of `order` tells rank 0 what it has, in one gather. The
// buffers that forward mutates are as they were before the attempt, here and afterwards. Rank 0's own part,
// which holds the state, is copied once and then handed on.
Status StepGuard::Impl::collect_evidence(const EvidenceOrder& order) {
  progress(Phase::kDecide);  // on every rank: whoever waits for a rerun must not seem to be behind it
  std::unique_ptr<EvidenceRecorder> own;
  try {
    own = start_evidence(order);
  } catch (...) {
    own.reset();  // no memory: evidence never decides
  }
  EvidencePart batch;
  if (order.cross_examines()) {
    if (Status s = hand_on_batch(order, own.get(), &batch); !s.ok()) return s;
  }
  RankEvidence evidence;
  Bytes mine;
  try {
    if (own) {
      complete_evidence(order, own.get());
      evidence.mutable_part()->Swap(&own->part());
    }
    if (order.cross_examines() && order.examiner == collective_.rank())
      examine(order, batch, evidence.mutable_examination());
    if (!coordinator_) mine = evidence.SerializeAsString();
  } catch (...) {
    mine.clear();
  }
  std::vector<Bytes> all;
  if (Status s = collective_.gather(mine, &all); !s.ok()) return s;
  if (!coordinator_) return Status();
  try {
    submit_evidence(order, &batch, &evidence, all);
  } catch (const std::exception& error) {
    coordinator_->tell_no_evidence(error.what());
  }
  return Status();
}

// On rank 0, with what it has itself, and what the others sent.
void StepGuard::Impl::submit_evidence(const EvidenceOrder& order, EvidencePart* batch, RankEvidence* own,
                                      const std::vector<Bytes>& all) {
  std::vector<EvidencePart> parts;
  std::optional<EvidencePart> examination;
  const auto take = [&](RankEvidence* from) {
    if (from->has_part()) parts.push_back(std::move(*from->mutable_part()));
    if (from->has_examination()) examination = std::move(*from->mutable_examination());
  };
  take(own);
  for (const Bytes& bytes : all) {
    RankEvidence evidence;
    if (!bytes.empty() && evidence.ParseFromString(bytes)) take(&evidence);
  }
  // What was sent ahead was not sent again.
  for (EvidencePart& part : parts) {
    if (!order.cross_examines() || part.rank() != order.examined) continue;
    for (EvidenceTensor& tensor : *batch->mutable_tensors()) part.add_tensors()->Swap(&tensor);
  }
  put_groups(groups_, &parts);
  coordinator_->submit_evidence(std::move(parts), examination ? &*examination : nullptr);
}

// Null for nothing.
std::unique_ptr<EvidenceRecorder> StepGuard::Impl::start_evidence(const EvidenceOrder& order) {
  const bool chosen = std::ranges::count(order.ranks, collective_.rank()) != 0;
  if (!chosen && !order.from_all && collective_.rank() != 0) return nullptr;
  auto recorder =
      std::make_unique<EvidenceRecorder>(collective_.rank(), log_.host(), chosen, chosen ? order.bytes : 0);
  // What this attempt measured says nothing of the update before it.
  if ((chosen || collective_.rank() == 0) && !order.of_update) {
    put_tallies(log_, scaler_.has_value(), &recorder->part());
    layers_.put(&recorder->part());
  }
  if (!chosen) return recorder;
  if (order.of_update) {
    record_subject(order, recorder.get());
  } else if (providers_.batch) {
    call(recorder.get(), [&] { providers_.batch(subject_of(order), *recorder); });
  }
  return recorder;
}

void StepGuard::Impl::complete_evidence(const EvidenceOrder& order, EvidenceRecorder* recorder) {
  const bool chosen = recorder->part().is_origin();
  if (!order.of_update && order.full && providers_.rerun && (chosen || order.from_all)) {
    const EvidenceSubject subject = subject_of(order);
    call(recorder, [&] { providers_.rerun(subject, *recorder); });
    snapshot_.restore();
    recorder->part().set_reran(true);
    recorder->part().set_rerun_agrees(recorder->found_again(subject));
  }
  if (collective_.rank() == 0 && order.full) add_state(order.state_bytes, &recorder->part());
}

EvidenceSubject StepGuard::Impl::subject_of(const EvidenceOrder& order) const {
  return {epoch_, attempt_, order.stage, order.tensor, order.index, order.micro_batch};
}

// Collective. What the examined origin's attempt was made of goes to rank 0, and from there to all, since a
// broadcast is what there is; `batch` is then the same on every rank. The origin's own part is without the
// tensors afterwards, unless it is rank 0's: rank 0 has them now. Sent ahead of the origin's rerun, so that
// the examiner's goes on at the same time.
Status StepGuard::Impl::hand_on_batch(const EvidenceOrder& order, EvidenceRecorder* own,
                                      EvidencePart* batch) {
  Bytes bytes;
  try {
    if (own != nullptr && collective_.rank() == order.examined) bytes = packed_batch(order, own);
  } catch (...) {
    bytes.clear();
  }
  std::vector<Bytes> all;
  if (Status s = collective_.gather(bytes, &all); !s.ok()) return s;
  const auto at = static_cast<std::size_t>(order.examined);
  if (coordinator_) bytes = at < all.size() ? std::move(all[at]) : Bytes();
  all.clear();
  if (Status s = collective_.broadcast(&bytes); !s.ok()) return s;
  if (!coordinator_ && collective_.rank() != order.examiner) return Status();
  try {
    if (!batch->ParseFromString(bytes)) batch->Clear();
    if (own != nullptr && collective_.rank() == order.examined)
      own->part().mutable_tensors()->Swap(batch->mutable_tensors());
  } catch (...) {
    batch->Clear();
  }
  return Status();
}

// `failure` says why there is none.
Bytes StepGuard::Impl::packed_batch(const EvidenceOrder& order, EvidenceRecorder* own) const {
  EvidencePart& from = own->part();
  EvidencePart batch;
  std::uint64_t bytes = 0;
  for (const EvidenceTensor& tensor : from.tensors()) bytes += tensor.data().size();
  if (!from.failure().empty()) {
    batch.set_failure("its batch is not known: " + from.failure());
  } else if (from.omitted_size() > 0) {
    const Omitted& first = from.omitted(0);
    batch.set_failure("its batch is not whole: " + first.what() + " is left out, for " + first.why());
  } else if (bytes > order.examined_bytes) {
    batch.set_failure("its batch has " + std::to_string(bytes) + " bytes, and may have " +
                      std::to_string(order.examined_bytes));
  } else if (from.tensors_size() == 0 && from.facts_size() == 0) {
    batch.set_failure("its batch is not known");
  } else {
    *batch.mutable_facts() = from.facts();
    batch.mutable_tensors()->Swap(from.mutable_tensors());
  }
  return batch.SerializeAsString();
}

// The attempt of order.examined, on this rank.
void StepGuard::Impl::examine(const EvidenceOrder& order, const EvidencePart& batch, EvidencePart* to) {
  EvidenceRecorder recorder(collective_.rank(), log_.host(), false, 0);
  const EvidenceSubject subject = subject_of(order);
  RecordedAttempt attempt;
  attempt.rank = order.examined;
  std::string why = batch.failure();
  if (batch.ByteSizeLong() == 0) why = "rank " + std::to_string(order.examined) + " sent no batch";
  if (why.empty() && !providers_.rerun_recorded) why = "its trainer has not said how";
  if (why.empty()) why = unpack_batch(batch, &attempt);
  if (why.empty()) {
    attempt.ranks = static_cast<std::uint64_t>(collective_.size());
    attempt.replicas = replicas_.size();
    attempt.loss_scale = scaler_ ? scaler_->scale() : 1.0;
    attempt.subject = subject;
    attempt.configuration = providers_.configuration;
    call(&recorder, [&] { providers_.rerun_recorded(attempt, recorder); });
    snapshot_.restore();
    recorder.part().set_reran(true);
    recorder.part().set_rerun_agrees(recorder.found_again(subject));
  } else {
    recorder.failed(why);
  }
  to->Swap(&recorder.part());
}

void StepGuard::Impl::end_layers() {
  LayerAttempt attempt;
  if (layers_.end(&attempt) && coordinator_) coordinator_->keep_layers(attempt);
}

// It has a deadline of its own.
void StepGuard::Impl::finish_evidence() {
  if (!coordinator_) return;
  if (watchdog_) watchdog_->board().pause();
  coordinator_->finish_evidence();
  if (watchdog_) watchdog_->board().resume();
}

// The tensor that holds what should not be there.
void StepGuard::Impl::record_subject(const EvidenceOrder& order, EvidenceRecorder* recorder) {
  for (const StateTensor& tensor : state_.tensors()) {
    if (tensor.name != order.tensor) continue;
    TensorView view = tensor.view();
    view.shape = tensor.shape;
    recorder->seen(tensor.name, view);
  }
}

// It has a quota of its own, apart from what rank 0 contributes as an origin.
void StepGuard::Impl::add_state(std::uint64_t most_bytes, EvidencePart* part) const {
  EvidenceRecorder recorder(collective_.rank(), log_.host(), false, most_bytes);
  for (const StateTensor& tensor : state_.tensors()) {
    TensorView view = tensor.view();
    view.shape = tensor.shape;
    recorder.state(tensor.name, view, tensor.held);
  }
  for (const StateBytes& bytes : state_.bytes()) {
    call(&recorder, [&] {
      const Bytes saved = bytes.save();
      recorder.state(bytes.name, TensorView::contiguous(saved.data(), DType::kUInt8, std::ssize(saved)),
                     bytes.held);
    });
  }
  for (EvidenceTensor& tensor : *recorder.part().mutable_tensors()) part->add_tensors()->Swap(&tensor);
  for (Omitted& omitted : *recorder.part().mutable_omitted()) part->add_omitted()->Swap(&omitted);
  if (!recorder.part().failure().empty()) {
    part->set_failure(part->failure().empty() ? recorder.part().failure()
                                              : part->failure() + "; " + recorder.part().failure());
  }
}

}  // namespace holdfast
