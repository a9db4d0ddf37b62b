// An incident of 8 ranks in which rank 7's and rank 2's forward went bad, with what the two contributed.
#pragma once

#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "coord/temp_dir.h"
#include "holdfast/coord/evidence/bundle.h"
#include "holdfast/coord/evidence/evidence.pb.h"
#include "holdfast/coord/evidence/evidence_store.h"

namespace holdfast {

constexpr std::chrono::seconds kLongEnough{20};

inline EvidenceTensor sample_tensor(EvidenceTensor::Role role, const std::string& name,
                                    const std::string& dtype, const std::vector<std::uint64_t>& shape,
                                    const std::string& data, int micro_batch = -1) {
  EvidenceTensor tensor;
  tensor.set_name(name);
  tensor.set_role(role);
  tensor.set_dtype(dtype);
  for (const std::uint64_t extent : shape) tensor.add_shape(extent);
  tensor.set_data(data);
  if (micro_batch >= 0) tensor.set_micro_batch(micro_batch);
  return tensor;
}

inline EvidencePart sample_part(int rank) {
  EvidencePart part;
  part.set_rank(rank);
  part.set_host("node-" + std::to_string(rank / 2));
  part.set_is_origin(true);
  *part.add_tensors() = sample_tensor(EvidenceTensor::BATCH, "targets", "U8", {3}, "\x01\x02\x03", 0);
  *part.add_tensors() = sample_tensor(EvidenceTensor::BATCH, "input", "F32", {2, 2}, "0123456789abcdef", 0);
  *part.add_tensors() = sample_tensor(EvidenceTensor::STATE, "fc.weight", "F32", {8}, std::string(32, 'w'));
  *part.add_tensors() = sample_tensor(EvidenceTensor::SEEN, "fc", "BF16", {4},
                                      std::string("\x80\x7f\xc0\x7f\x01\0\x02\0", 8), 0);
  StageTotal* stage = part.add_stages();
  stage->set_stage(1);
  stage->set_tensors(1);
  stage->set_elements(4);
  stage->set_nan(1);
  stage->set_pos_inf(1);
  stage->set_abs_max(3.5);
  stage->add_names("fc");
  stage->set_dtype("BF16");
  Named* fact = part.add_facts();
  fact->set_name("rng_key");
  fact->set_value("rank " + std::to_string(rank));
  return part;
}

inline BundleManifest sample_about(std::uint64_t attempt = 1842) {
  BundleManifest about;
  about.set_epoch(1);
  about.set_attempt(attempt);
  about.set_update(1840);
  about.set_ranks(8);
  about.set_time("2026-11-29T16:23:27.622Z");
  about.set_library("0.1.0");
  about.set_run("5f1d");
  about.set_kind("NON_FINITE");
  about.set_stage(1);
  about.set_nan(2);
  about.set_pos_inf(2);
  about.set_action("SKIP");
  about.set_loss(0.5);
  for (const int rank : {2, 7}) {
    IncidentOrigin* origin = about.add_origins();
    origin->set_rank(rank);
    origin->set_host("node-" + std::to_string(rank / 2));
    origin->set_stage(1);
    origin->set_tensor("fc");
    origin->set_index(1);
    origin->set_nan(1);
    origin->set_pos_inf(1);
    origin->set_micro_batch(0);
  }
  return about;
}

inline std::vector<EvidencePart> sample_parts() { return {sample_part(7), sample_part(2)}; }
constexpr std::uint64_t kSampleTensorBytes = 2 * (3 + 16 + 32 + 8);

// The one outcome of what was submitted; `reason` says so when there is not one.
inline BundleOutcome only_outcome(EvidenceStore& store) {
  const bool done = store.wait_for(kLongEnough);
  std::vector<BundleOutcome> outcomes = store.take_outcomes();
  if (done && outcomes.size() == 1) return outcomes.front();
  BundleOutcome none;
  none.reason = done ? std::to_string(outcomes.size()) + " outcomes" : "not done in time";
  return none;
}

inline BundleOutcome submit_and_wait(EvidenceStore& store, const BundleManifest& about,
                                     const std::vector<EvidencePart>& parts) {
  store.submit(about, parts);
  return only_outcome(store);
}

inline std::unique_ptr<EvidenceStore> open_store(const std::string& incidents,
                                                 const EvidenceOptions& options = {},
                                                 FileSystem& files = real_file_system()) {
  std::unique_ptr<EvidenceStore> store;
  const Status status = EvidenceStore::create(files, incidents, options, &store);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.message().c_str());
  return store;
}

inline std::unique_ptr<Bundle> open_bundle(const std::string& path, std::string* why = nullptr) {
  std::unique_ptr<Bundle> bundle;
  const Status status = Bundle::open(real_file_system(), path, &bundle);
  if (why != nullptr) *why = status.message();
  return bundle;
}

// "" when it can be opened and every byte is what was written; otherwise the first fault.
inline std::string fault_of_bundle(const std::string& path) {
  std::string why;
  const auto bundle = open_bundle(path, &why);
  if (bundle == nullptr) return why.empty() ? "no reason" : why;
  const std::vector<std::string> faults = bundle->verify();
  return faults.empty() ? "" : faults.front();
}

}  // namespace holdfast
