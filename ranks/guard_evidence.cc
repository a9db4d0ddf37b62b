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

// Collective, when evidence is wanted: each rank of `order` tells rank 0 what it has, in one gather. The
// buffers that forward mutates are as they were before the attempt, here and afterwards.
Status StepGuard::Impl::collect_evidence(const EvidenceOrder& order) {
  const bool chosen = std::ranges::count(order.ranks, collective_.rank()) != 0;
  Bytes mine;
  if (chosen || order.from_all || collective_.rank() == 0) {
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
    mine = recorder.part().SerializeAsString();
    if (collective_.rank() == 0 && order.full) mine += state_evidence(order.state_bytes);
  }
  std::vector<Bytes> all;
  if (Status s = collective_.gather(mine, &all); !s.ok()) return s;
  if (!coordinator_) return Status();
  std::vector<EvidencePart> parts;
  for (const Bytes& bytes : all) {
    EvidencePart part;
    if (!bytes.empty() && part.ParseFromString(bytes)) parts.push_back(std::move(part));
  }
  coordinator_->submit_evidence(std::move(parts));
  return Status();
}

void StepGuard::Impl::ask_providers(const EvidenceOrder& order, bool chosen, EvidenceRecorder* recorder) {
  const EvidenceSubject subject{epoch_, attempt_, order.stage, order.tensor, order.index, order.micro_batch};
  if (chosen && providers_.batch) call(recorder, [&] { providers_.batch(subject, *recorder); });
  if (!order.full || !providers_.rerun || (!chosen && !order.from_all)) return;
  progress(Phase::kDecide);
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

// Appended to rank 0's own part: Protobuf merges what is concatenated.
Bytes StepGuard::Impl::state_evidence(std::uint64_t most_bytes) const {
  EvidenceRecorder recorder(collective_.rank(), log_.host(), false, most_bytes);
  EvidencePart& part = recorder.part();
  for (const StateTensor& tensor : state_.tensors()) {
    TensorView view = tensor.view();
    view.shape = tensor.shape;
    recorder.state(tensor.name, view);
  }
  for (const StateBytes& bytes : state_.bytes()) {
    call(&recorder, [&] {
      const Bytes saved = bytes.save();
      recorder.state(bytes.name, TensorView::contiguous(saved.data(), DType::kUInt8, std::ssize(saved)));
    });
  }
  // What rank and host are has been said, and whether it is an origin.
  part.clear_rank();
  part.clear_host();
  part.clear_is_origin();
  return part.SerializeAsString();
}

}  // namespace holdfast
