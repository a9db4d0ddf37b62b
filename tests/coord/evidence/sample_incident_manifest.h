// The manifest of an incident as rank 0 could have written it: a NaN and an infinity in one of rank 2's
// gradients.
#pragma once

#include <string>

#include "holdfast/collectives/record.h"
#include "holdfast/coord/evidence/evidence.pb.h"

namespace holdfast {

inline const std::string kSampleContentId = "training-incident-evidence@sha256:" + std::string(64, 'a');

struct SampleStage {
  Stage stage = Stage::kInput;
  std::uint64_t tensors = 1;
  std::uint64_t elements = 1;
  BadCounts bad;
  double abs_max = 1;
  const char* dtype = "F32";
  const char* name = "x";
};

inline StageTotal* add_stage(const SampleStage& from, EvidencePart* part) {
  StageTotal* total = part->add_stages();
  total->set_stage(static_cast<int>(from.stage));
  total->set_tensors(from.tensors);
  total->set_elements(from.elements);
  total->set_nan(from.bad.nan);
  total->set_pos_inf(from.bad.pos_inf);
  total->set_neg_inf(from.bad.neg_inf);
  total->set_abs_max(from.abs_max);
  total->add_names(from.name);
  total->set_dtype(from.dtype);
  return total;
}

inline void add_configuration(const char* name, const std::string& value, BundleManifest* manifest) {
  Named* named = manifest->add_configuration();
  named->set_name(name);
  named->set_value(value);
}

// The origin's part, with all stages clean up to `dirty`, which holds `bad`.
inline void set_origin(Stage dirty, const BadCounts& bad, BundleManifest* manifest) {
  manifest->set_stage(static_cast<int>(dirty));
  manifest->set_nan(bad.nan);
  manifest->set_pos_inf(bad.pos_inf);
  manifest->set_neg_inf(bad.neg_inf);
  manifest->clear_origins();
  manifest->clear_parts();
  IncidentOrigin* origin = manifest->add_origins();
  origin->set_rank(2);
  origin->set_host("node-1");
  origin->set_stage(static_cast<int>(dirty));
  origin->set_tensor("conv1.weight");
  origin->set_index(17);
  origin->set_nan(bad.nan);
  origin->set_pos_inf(bad.pos_inf);
  origin->set_neg_inf(bad.neg_inf);
  origin->set_device("GPU-1234");
  EvidencePart* part = manifest->add_parts();
  part->set_rank(2);
  part->set_host("node-1");
  part->set_is_origin(true);
  part->set_reran(true);
  part->set_rerun_agrees(true);
  part->set_last_clean("conv2.weight");
  part->set_first_dirty("conv1.weight");
  const SampleStage stages[] = {{Stage::kInput, 1, 25088, {}, 2.75, "F32", "images"},
                                {Stage::kForward, 4, 40960, {}, 31.5, "F32", "logits"},
                                {Stage::kLoss, 1, 1, {}, 0.46875, "F32", "loss"},
                                {Stage::kBackward, 8, 20538, {}, 0.1, "F16", "conv1.weight"},
                                {Stage::kReduction, 8, 5134, {}, 0.25, "F32", "conv1.weight"},
                                {Stage::kOptimizer, 8, 20538, {}, 0.001, "F32", "conv1.weight"}};
  for (SampleStage stage : stages) {
    if (stage.stage > dirty) break;
    if (stage.stage == dirty) {
      stage.bad = bad;
      stage.elements += bad.total();
    }
    add_stage(stage, part);
  }
}

inline BundleManifest sample_incident_manifest() {
  BundleManifest manifest;
  manifest.set_epoch(1);
  manifest.set_attempt(1842);
  manifest.set_update(1840);
  manifest.set_ranks(4);
  manifest.set_time("2026-11-29T16:23:27.622Z");
  manifest.set_library("0.1.0");
  manifest.set_run("run-5f3a");
  manifest.set_kind("NON_FINITE");
  manifest.set_action("SKIP");
  manifest.set_reason("2 non-finite values at backward, first on rank 2 (host node-1) in conv1.weight[17]");
  manifest.set_loss(0.46875);
  manifest.set_loss_scale(65536);
  manifest.set_policy("stage_owners { loss: \"eva\" forward: \"ben\" }");
  manifest.set_owner("ana");
  manifest.set_ticket("RUN-142");
  manifest.set_stage_owner("kim");
  add_configuration("model", "fashion-mnist-cnn", &manifest);
  add_configuration("data", "dataset-fashion-mnist", &manifest);
  add_configuration("objective", "cross-entropy", &manifest);
  add_configuration("optimizer", "sgd lr=0.1", &manifest);
  set_origin(Stage::kBackward, {1, 1, 0}, &manifest);
  EvidencePart* part = manifest.mutable_parts(0);
  part->mutable_stages(3)->set_scaled(true);
  Named* fact = part->add_facts();
  fact->set_name("sample_ids");
  fact->set_value("17,4,99");
  return manifest;
}

}  // namespace holdfast
