// The contract training-incident-v1: its words and limits, each with its reason, and a report as a structure.
// What is made and what is checked go by this file alone.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "holdfast/collectives/status.h"

namespace holdfast::incident_contract {

inline constexpr std::string_view kVersion = "training-incident-v1";
inline constexpr std::string_view kRootCauseClaim = "NONE_SYMPTOM_LOCATION_IS_NOT_CAUSALITY";
inline constexpr std::string_view kHold = "HOLD";                              // the run ended or went back
inline constexpr std::string_view kContinue = "CONTINUE_BOUNDED_DIAGNOSTICS";  // skipped within its budget
inline constexpr std::string_view kObserved = "OBSERVED";
inline constexpr std::string_view kNotRun = "NOT_RUN";
inline constexpr std::string_view kNone = "none";
inline constexpr std::string_view kNotRecorded = "not recorded";

inline constexpr std::string_view kReportIdPrefix = "training-incident-report@sha256:";
inline constexpr std::string_view kTensorSetIdPrefix = "tensor-set@sha256:";
inline constexpr std::string_view kTelemetryIdPrefix = "telemetry@sha256:";
inline constexpr std::string_view kDigestPrefix = "sha256:";

// ---- Limits

// A report at all of the limits below, escaped, takes less. A larger text is refused before it is parsed.
inline constexpr std::size_t kLargestReport = 128 << 10;
// report > stages > stage > tensor_set > names.
inline constexpr int kDeepest = 5;
// A report at all of the limits has fewer values and keys.
inline constexpr std::size_t kMostValues = 1000;
// What a person reads at a glance, and what names of layers and hosts need.
inline constexpr std::size_t kLongestText = 256;
// Names tell a reader what a set is; its size is told by `observations`, its whole by the evidence.
inline constexpr std::size_t kMostNames = 16;
// 2^53: readers of JSON that know doubles alone still read it exactly.
inline constexpr std::uint64_t kLargestNumber = std::uint64_t{1} << 53;
// 2^44 - 1 values of one stage on one rank: where a record's counts saturate, so that no larger count is one.
inline constexpr std::uint64_t kMostInStage = (std::uint64_t{1} << 44) - 1;
// 2^45 values of all stages: beside one saturated stage there is room for the others; what claims more is no
// attempt of one rank.
inline constexpr std::uint64_t kMostInReport = std::uint64_t{1} << 45;
// Measurements of a stage: a million layers, or thousands in each of hundreds of micro-batches.
inline constexpr std::uint64_t kMostObservations = std::uint64_t{1} << 20;
// Far above any job that has run, and small enough for every integer type.
inline constexpr std::uint64_t kLargestRank = (std::uint64_t{1} << 20) - 1;
// The scaler never goes above 2^24, where fp16 has no gradient left that would not overflow. Below 2^-24 a
// loss of one would vanish in fp16.
inline constexpr double kLargestLossScale = 16777216.0;
inline constexpr double kSmallestLossScale = 1.0 / 16777216.0;

// ---- Tables

struct StageRule {
  std::string_view name;
  std::string_view action;
  std::array<std::string_view, 3>
      probe_sources;  // beside kNone: no tensor of that stage was given to the guard
};
inline constexpr std::size_t kStages = 5;
extern const std::array<StageRule, kStages> kStageRules;
inline constexpr std::string_view kNoAction = "no-nonfinite-evidenced-check-other-signals";

struct DtypeRule {
  std::string_view name;  // as in safetensors; magnitudes of a complex one are those of its parts
  double largest;
  double smallest;  // above zero: the smallest subnormal number; 1 for integers
  bool has_nonfinite;
};
const DtypeRule* find_dtype(std::string_view name);

inline constexpr std::array<std::string_view, 6> kBindings = {"model",     "data",      "batch",
                                                              "objective", "optimizer", "precision"};

// All of it as a text, and "training-incident-contract@sha256:<hex>" of that.
std::string rules();
extern const std::string_view kContractId;

// ---- A report

struct Binding {
  std::string identity;
  std::string digest;  // kDigestPrefix and SHA-256 of the whole
  bool recorded() const { return !digest.empty(); }
};

struct StageReport {
  std::string name;
  std::string status;
  std::string owner;
  std::string probe_source;
  std::string telemetry_id;
  std::string tensor_set_id;
  std::uint64_t observations = 0;
  std::vector<std::string> names;  // sorted, without repetition, capped
  std::optional<std::string> dtype;
  bool scaled = false;
  std::uint64_t total = 0;
  std::uint64_t finite = 0;
  std::uint64_t nonfinite = 0;
  std::uint64_t nan = 0;
  std::uint64_t pos_inf = 0;
  std::uint64_t neg_inf = 0;
  std::optional<double> finite_abs_max;  // absent when nothing was finite
};

// Where the first non-finite value was seen.
struct Boundary {
  std::string stage;  // of the six that an attempt has: `reduction` is told apart here
  std::uint64_t rank = 0;
  std::string host;
  std::string device;
  std::string tensor;
  std::uint64_t index = 0;
  std::optional<std::string> last_clean;
  std::optional<std::string> first_dirty;
};

struct Report {
  std::string contract_version;
  std::string contract_id;
  std::string run;
  std::uint64_t epoch = 0;
  std::uint64_t attempt = 0;
  std::uint64_t update = 0;
  std::string evidence_id;
  std::string evidence_content_id;
  std::string decision;
  std::string earliest;
  std::string action;
  std::string root_cause_claim;
  std::optional<Boundary> boundary;
  std::array<Binding, kBindings.size()> bindings;
  std::string loss_scale_identity;
  double loss_scale = 1;
  Binding probe_sources;
  std::vector<StageReport> stages;
  std::string report_id;
};

// In the contract's order, without `report_content_id` when that is empty.
nlohmann::ordered_json to_json(const Report& report);

// Fields, kinds of values and lengths. "" or what is wrong, with the field.
std::string from_json(const nlohmann::ordered_json& json, Report* report);

// Everything else, but not whether report_id is that of the report. "" or what is wrong, with the field.
std::string fault_of(const Report& report);

// What follows from the rest of a report.
std::string tensor_set_id(const StageReport& stage);
std::string telemetry_id(const Report& report, const StageReport& stage);
std::string probe_sources_digest(const Report& report);
std::string report_id(const nlohmann::ordered_json& report);
std::string evidence_id(const std::string& run, std::uint64_t epoch, std::uint64_t attempt);
std::string_view stage_of_report(std::string_view stage_of_attempt);  // `reduction` is `backward`
std::string_view action_of(std::string_view earliest);

// JSON as RFC 8259 has it, and stricter: no key twice, no byte order mark, and no more of anything than the
// limits above. "" or what is wrong.
std::string parse_strict_json(const std::string& text, nlohmann::ordered_json* out);

// `bytes` as a text of a report: UTF-8, control characters as "\x1b", at most kLongestText bytes.
std::string text_of(std::string_view bytes);
bool is_text(std::string_view text);  // what text_of() could have given

}  // namespace holdfast::incident_contract
