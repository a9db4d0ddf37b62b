// What a trainer can tell of an attempt that went wrong, so that it can be made again offline. Asked for on
// an incident only: a clean attempt copies nothing.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "holdfast/collectives/record.h"
#include "holdfast/scan.h"
#include "holdfast/tensor_view.h"
#include "holdfast/training_state.h"

namespace holdfast {

class EvidencePart;
class EvidenceTensor;
struct RecordedAttempt;  // in holdfast/replay.h

// What is to be explained: the earliest finding of the attempt's first origin, the same on every rank.
struct EvidenceSubject {
  std::uint64_t epoch = 0;
  std::uint64_t attempt = 0;
  Stage stage = Stage::kInput;
  std::string tensor;
  std::int64_t index = -1;  // flat, row-major
  int micro_batch = -1;     // -1: of the whole window, or none
};

// Takes it down on one rank. Caps are its own: what does not fit is put on record as left out. Not
// thread-safe.
class EvidenceRecorder {
 public:
  enum class Kind { kActivation, kActivationGradient, kParameterGradient, kOther };

  // `most_bytes` of tensors.
  EvidenceRecorder(int rank, std::string host, bool is_origin, std::uint64_t most_bytes);
  ~EvidenceRecorder();

  // A tensor that the attempt is made of, such as images and labels, as it is now. `micro_batch` -1: of all.
  void batch(std::string_view name, const TensorView& tensor, int micro_batch = -1);
  // One that was seen, such as a reduced gradient.
  void seen(std::string_view name, const TensorView& tensor, int micro_batch = -1);
  // Named values: sample ids, keys of random numbers, counts.
  void fact(std::string_view name, std::string_view value);
  // A measurement of a rerun, in the order of the computation. `scaled`: by the loss scale.
  void layer(Stage stage, Kind kind, std::string_view tensor, const TensorView& values, int micro_batch,
             bool scaled);

  // For the guard.
  void state(std::string_view name, const TensorView& tensor, Held held);
  void failed(std::string_view what);
  bool found_again(const EvidenceSubject& subject) const;  // a layer() held the subject's value at its place
  EvidencePart& part() { return *part_; }

 private:
  // Null when it is left out.
  EvidenceTensor* add(int role, std::string_view name, const TensorView& tensor, int micro_batch);

  const std::unique_ptr<EvidencePart> part_;
  std::uint64_t bytes_left_;
  bool dirty_ = false;  // a layer() was not finite
};

// Called on origin ranks, and one of them on another, between decide() and finish() of a skipped attempt:
// parameters, optimizer state and the buffers given to protect() are as they were before it. They may throw:
// that is put on record.
struct EvidenceProviders {
  // Tensors and facts from which the attempt's inputs can be made again.
  std::function<void(const EvidenceSubject&, EvidenceRecorder&)> batch;
  // Makes this rank's attempt again up to its own gradients, with the same random numbers, calling layer()
  // for each tensor; no collective, no update. Buffers that forward mutates are put back by the guard. For a
  // finding at stage reduction it is called on every rank of the first origin's replica group, and has to add
  // the fact "local_gradient": this rank's value at the subject's index, in the type that is reduced. An
  // origin of another group is asked, too, and adds none when it has no such tensor.
  std::function<void(const EvidenceSubject&, EvidenceRecorder&)> rerun;
  // Makes the attempt of another rank again, `attempt`.rank, as `rerun` does this rank's own: of what that
  // rank's `batch` put on record, on this rank's device and parameters, which are the same. Called on a rank
  // that rank 0 has chosen, while the origin is in `rerun`: whether both find the same tells a device from
  // the data. What is taken to be wrong with the other rank's device must not be made again here. Same on
  // every rank: given, or empty, for no cross-examination. An attempt that this rank cannot make is to be
  // told by throwing.
  std::function<void(const RecordedAttempt& attempt, EvidenceRecorder&)> rerun_recorded;
  // What the run is: workload, precision, optimizer, batch size, ... Strings, by name.
  std::map<std::string, std::string> configuration;
  // Faults that are put in on purpose: said to be so in every report.
  std::vector<std::string> injected;
  // Environment variables whose values may be put on record.
  std::vector<std::string> environment;
};

}  // namespace holdfast
