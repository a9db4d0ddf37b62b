// What guarded_train tells of an attempt that went wrong, and how a record of it is read back.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "holdfast/evidence.h"
#include "train/local_attempt.h"
#include "train/optimizer.h"
#include "train/options.h"
#include "train/prepare.h"
#include "train/workload.h"

namespace holdfast::train {

// All must outlive the guard. `plan` and `scale` are those of the running attempt.
EvidenceProviders evidence_providers(const Options& options, int world_size, const Preparation& prepared,
                                     LocalAttempt& local, const AttemptPlan& plan, const UpdateScale& scale);

// Variables that the bits of an attempt may depend on.
std::vector<std::string> evidence_environment();

// Names of facts and of configuration, shared with the replay.
namespace fact {
inline constexpr std::string_view kSamples = "samples.";  // + micro-batch: ids, "3,17,..."
inline constexpr std::string_view kRngKey = "rng_key.";   // + micro-batch
inline constexpr std::string_view kDenominator = "denominator";
inline constexpr std::string_view kGradientFactor = "gradient_factor";  // of the update
inline constexpr std::string_view kLearningRate = "learning_rate";
inline constexpr std::string_view kLocalGradient =
    "local_gradient";  // at the subject's index, in the reduced type
}  // namespace fact

// Exact, and back: hexadecimal floating point. False for anything else.
std::string exact(double value);
bool parse_exact(const std::string& text, double* value);

// One slice of the gradients as it is reduced: rounded to `dtype` in `scratch`, or where it is for fp32.
TensorView as_reduced(std::span<const float> gradients, const BucketSlice& slice, DType dtype,
                      std::vector<std::uint16_t>* scratch);

// The slice that a tensor's name, with or without "/part" behind it, belongs to; null when there is none.
const BucketSlice* slice_of(std::span<const BucketSlice> layout, std::string_view name);

}  // namespace holdfast::train
