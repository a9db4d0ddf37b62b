#include <cmath>
#include <cstring>

#include "checkpoint/part_file.h"
#include "holdfast/coord/evidence/evidence.pb.h"
#include "holdfast/evidence.h"
#include "probe_message.h"

namespace holdfast {
namespace {

constexpr std::size_t kMostTextBytes = 4096;
constexpr int kMostLayers = 4096;  // of all micro-batches
constexpr int kMostFacts = 1024;

std::string clip(std::string_view text) { return std::string(text.substr(0, kMostTextBytes)); }

}  // namespace

void put_probe(Stage stage, EvidenceRecorder::Kind kind, std::string_view tensor, DType dtype,
               const Probe& probe, int micro_batch, bool scaled, TensorProbe* to) {
  to->set_tensor(clip(tensor));
  to->set_stage(static_cast<int>(stage));
  to->set_kind(static_cast<TensorProbe::Kind>(static_cast<int>(kind) + 1));
  to->set_micro_batch(micro_batch);
  to->set_elements(probe.count);
  to->set_nan(probe.bad.nan);
  to->set_pos_inf(probe.bad.pos_inf);
  to->set_neg_inf(probe.bad.neg_inf);
  to->set_first_bad(probe.first_bad);
  to->set_abs_max(probe.abs_max);
  const std::uint64_t finite = probe.count - probe.bad.total();
  to->set_root_mean_square(finite == 0 ? 0.0 : probe.squares.root() / std::sqrt(static_cast<double>(finite)));
  to->set_scaled(scaled);
  to->set_dtype(std::string(stored_dtype(dtype)));
}

EvidenceRecorder::EvidenceRecorder(int rank, std::string host, bool is_origin, std::uint64_t most_bytes)
    : part_(std::make_unique<EvidencePart>()), bytes_left_(most_bytes) {
  part_->set_rank(rank);
  part_->set_host(std::move(host));
  part_->set_is_origin(is_origin);
}
EvidenceRecorder::~EvidenceRecorder() = default;

void EvidenceRecorder::batch(std::string_view name, const TensorView& tensor, int micro_batch) {
  add(EvidenceTensor::BATCH, name, tensor, micro_batch);
}
void EvidenceRecorder::seen(std::string_view name, const TensorView& tensor, int micro_batch) {
  add(EvidenceTensor::SEEN, name, tensor, micro_batch);
}
void EvidenceRecorder::state(std::string_view name, const TensorView& tensor, Held held) {
  EvidenceTensor* added = add(EvidenceTensor::STATE, name, tensor, -1);
  if (added != nullptr) added->set_held(static_cast<int>(held));
}

EvidenceTensor* EvidenceRecorder::add(int role, std::string_view name, const TensorView& tensor,
                                      int micro_batch) {
  const auto bytes = static_cast<std::uint64_t>(tensor.element_count * dtype_size(tensor.dtype));
  const bool contiguous = tensor.strides.empty();
  if (!contiguous || bytes > bytes_left_) {
    Omitted* omitted = part_->add_omitted();
    omitted->set_what(clip(name));
    omitted->set_bytes(bytes);
    omitted->set_why(contiguous ? "quota" : "not contiguous");
    return nullptr;
  }
  bytes_left_ -= bytes;
  EvidenceTensor* to = part_->add_tensors();
  to->set_name(clip(name));
  to->set_role(static_cast<EvidenceTensor::Role>(role));
  to->set_dtype(std::string(stored_dtype(tensor.dtype)));
  if (tensor.shape.empty()) {
    to->add_shape(static_cast<std::uint64_t>(tensor.element_count));
  } else {
    for (const std::int64_t size : tensor.shape) to->add_shape(static_cast<std::uint64_t>(size));
  }
  if (tensor.dtype == DType::kComplex128) to->add_shape(2);
  to->set_data(tensor.data, bytes);
  to->set_micro_batch(micro_batch);
  return to;
}

void EvidenceRecorder::fact(std::string_view name, std::string_view value) {
  if (part_->facts_size() >= kMostFacts) return;
  Named* to = part_->add_facts();
  to->set_name(clip(name));
  to->set_value(std::string(value));
}

void EvidenceRecorder::layer(Stage stage, Kind kind, std::string_view tensor, const TensorView& values,
                             int micro_batch, bool scaled) {
  if (part_->layers_size() >= kMostLayers) return;
  const Probe probe = scan(values);
  if (!dirty_) {
    if (probe.finite()) {
      part_->set_last_clean(clip(tensor));
    } else {
      part_->set_first_dirty(clip(tensor));
      dirty_ = true;
    }
  }
  put_probe(stage, kind, tensor, values.dtype, probe, micro_batch, scaled, part_->add_layers());
}

void EvidenceRecorder::failed(std::string_view what) {
  const std::string before = part_->failure().empty() ? "" : part_->failure() + "; ";
  part_->set_failure(clip(before + std::string(what)));
}

bool EvidenceRecorder::found_again(const EvidenceSubject& subject) const {
  for (const TensorProbe& probe : part_->layers()) {
    const bool same_micro =
        subject.micro_batch < 0 || probe.micro_batch() < 0 || probe.micro_batch() == subject.micro_batch;
    if (probe.stage() == static_cast<int>(subject.stage) && probe.tensor() == subject.tensor && same_micro &&
        probe.first_bad() == subject.index) {
      return true;
    }
  }
  return false;
}

}  // namespace holdfast
