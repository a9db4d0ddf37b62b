// What a rank contributes to the evidence of an attempt that was not clean.
#include <algorithm>
#include <exception>

#include "checkpoint/part_file.h"
#include "guard_impl.h"
#include "holdfast/coord/evidence/evidence.pb.h"
#include "holdfast/evidence.h"
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

}  // namespace

void StepGuard::Impl::provide_evidence(EvidenceProviders providers) {
  providers_ = std::move(providers);
  if (!coordinator_) return;
  coordinator_->keep_evidence(
      {providers_.configuration, describe_environment(providers_.environment), providers_.injected});
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
  std::vector<EvidencePart> parts;
  Bytes mine;
  try {
    std::optional<EvidencePart> own = own_evidence(order);
    if (own && coordinator_)
      parts.push_back(std::move(*own));
    else if (own)
      mine = own->SerializeAsString();
  } catch (...) {
    mine.clear();  // no memory: evidence never decides
  }
  std::vector<Bytes> all;
  if (Status s = collective_.gather(mine, &all); !s.ok()) return s;
  if (!coordinator_) return Status();
  try {
    for (const Bytes& bytes : all) {
      EvidencePart part;
      if (!bytes.empty() && part.ParseFromString(bytes)) parts.push_back(std::move(part));
    }
    put_groups(groups_, &parts);
    coordinator_->submit_evidence(std::move(parts));
  } catch (const std::exception& error) {
    coordinator_->tell_no_evidence(error.what());
  }
  return Status();
}

std::optional<EvidencePart> StepGuard::Impl::own_evidence(const EvidenceOrder& order) {
  const bool chosen = std::ranges::count(order.ranks, collective_.rank()) != 0;
  if (!chosen && !order.from_all && collective_.rank() != 0) return std::nullopt;
  EvidenceRecorder recorder(collective_.rank(), log_.host(), chosen, chosen ? order.bytes : 0);
  // What this attempt measured says nothing of the update before it.
  if ((chosen || collective_.rank() == 0) && !order.of_update) {
    put_tallies(log_, scaler_.has_value(), &recorder.part());
  }
  if (order.of_update) {
    if (chosen) record_subject(order, &recorder);
  } else {
    ask_providers(order, chosen, &recorder);
  }
  if (collective_.rank() == 0 && order.full) add_state(order.state_bytes, &recorder.part());
  return std::move(recorder.part());
}

// It has a deadline of its own.
void StepGuard::Impl::finish_evidence() {
  if (!coordinator_) return;
  if (watchdog_) watchdog_->board().pause();
  coordinator_->finish_evidence();
  if (watchdog_) watchdog_->board().resume();
}

void StepGuard::Impl::ask_providers(const EvidenceOrder& order, bool chosen, EvidenceRecorder* recorder) {
  const EvidenceSubject subject{epoch_, attempt_, order.stage, order.tensor, order.index, order.micro_batch};
  if (chosen && providers_.batch) call(recorder, [&] { providers_.batch(subject, *recorder); });
  if (!order.full || !providers_.rerun || (!chosen && !order.from_all)) return;
  call(recorder, [&] { providers_.rerun(subject, *recorder); });
  snapshot_.restore();
  recorder->part().set_reran(true);
  recorder->part().set_rerun_agrees(recorder->found_again(subject));
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
