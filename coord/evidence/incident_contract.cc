#include "incident_contract.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cfloat>
#include <limits>

#include "holdfast/coord/evidence/bundle.h"
#include "holdfast/coord/generation_id.h"
#include "holdfast/coord/printable.h"
#include "holdfast/coord/storage/sha256.h"

namespace holdfast::incident_contract {
namespace {

// Numbers of texts, so that no two lists of texts give the same bytes.
class Digest {
 public:
  Digest& add(std::string_view text) {
    bytes_ += fmt::format("{}:{};", text.size(), text);
    return *this;
  }
  Digest& add(std::uint64_t number) { return add(fmt::format("{}", number)); }
  std::string id(std::string_view prefix) const { return std::string(prefix) + hex(sha256(bytes_)); }

 private:
  std::string bytes_;
};

// No library's way to print a number is part of the contract.
std::uint64_t bits(double value) { return std::bit_cast<std::uint64_t>(value); }

constexpr double kFloat32Subnormal = 0x1p-149;

constexpr auto kDtypes = std::to_array<DtypeRule>({
    {"F64", DBL_MAX, std::numeric_limits<double>::denorm_min(), true},
    {"F32", FLT_MAX, kFloat32Subnormal, true},
    {"BF16", 0x1.fep127, 0x1p-133, true},
    {"F16", 65504.0, 0x1p-24, true},
    {"F8_E5M2", 57344.0, 0x1p-16, true},
    {"F8_E4M3", 448.0, 0x1p-9, true},
    {"C64", FLT_MAX, kFloat32Subnormal, true},
    {"I64", 0x1p63, 1, false},
    {"I32", 0x1p31, 1, false},
    {"I16", 0x1p15, 1, false},
    {"I8", 0x1p7, 1, false},
    {"U64", 0x1p64, 1, false},
    {"U32", 0x1p32 - 1, 1, false},
    {"U16", 0x1p16 - 1, 1, false},
    {"U8", 255, 1, false},
    {"BOOL", 1, 1, false},
});

}  // namespace

const std::array<StageRule, kStages> kStageRules = {{
    {"input", "hold-and-inspect-input-data-contract", {"batch-tensors", "", ""}},
    {"forward", "hold-and-replay-forward-activations", {"module-outputs", "", ""}},
    {"loss", "hold-and-inspect-objective-reduction", {"loss-values", "", ""}},
    {"backward",
     "hold-and-inspect-gradient-path-and-loss-scaling",
     {"local-gradients", "reduced-gradients", "local-and-reduced-gradients"}},
    {"optimizer",
     "hold-and-inspect-optimizer-state-and-update",
     {"prospective-update", "written-update", ""}},
}};

const DtypeRule* find_dtype(std::string_view name) {
  const auto found = std::ranges::find(kDtypes, name, &DtypeRule::name);
  return found == kDtypes.end() ? nullptr : &*found;
}

// Made of what the checks go by, so that none can change without the id: a test compares it with kContractId.
std::string rules() {
  std::string text = fmt::format("{}\nroot_cause_claim {}\ndecisions {} {}\nstatus {} {}\n", kVersion,
                                 kRootCauseClaim, kHold, kContinue, kObserved, kNotRun);
  for (const StageRule& stage : kStageRules) {
    text += fmt::format("stage {} action {} probes {}", stage.name, stage.action, kNone);
    for (const std::string_view source : stage.probe_sources) {
      if (!source.empty()) text += fmt::format(" {}", source);
    }
    text += "\n";
  }
  text += fmt::format("stage none action {}\nstage reduction is backward\nbindings", kNoAction);
  for (const std::string_view binding : kBindings) text += fmt::format(" {}", binding);
  text += " loss_scale probe_sources\n";
  for (const DtypeRule& dtype : kDtypes) {
    text += fmt::format("dtype {} largest {:016x} smallest {:016x} nonfinite {}\n", dtype.name,
                        bits(dtype.largest), bits(dtype.smallest), dtype.has_nonfinite);
  }
  text += fmt::format("bytes {} depth {} values {} text {} names {} number {} stage {} report {}\n",
                      kLargestReport, kDeepest, kMostValues, kLongestText, kMostNames, kLargestNumber,
                      kMostInStage, kMostInReport);
  text += fmt::format("observations {} rank {} loss_scale {:016x} to {:016x} power of two\n",
                      kMostObservations, kLargestRank, bits(kSmallestLossScale), bits(kLargestLossScale));
  text +=
      "fields contract_version contract_content_id run step evidence_id evidence_content_id decision "
      "earliest_nonfinite_stage action root_cause_claim boundary bindings stages report_content_id\n"
      "step epoch attempt update; binding identity digest; loss_scale identity value\n"
      "boundary stage rank host device tensor index last_clean first_dirty\n"
      "stage stage status owner probe_source telemetry_id tensor_set dtype scaled total finite nonfinite nan "
      "pos_inf neg_inf finite_abs_max; tensor_set id observations names\n"
      "total = finite + nonfinite; nonfinite = nan + pos_inf + neg_inf; finite_abs_max null when finite = 0\n"
      "NOT_RUN after an earlier stage with nonfinite > 0, with all counts 0, and before no OBSERVED\n"
      "earliest_nonfinite_stage is the first with nonfinite > 0, or none; boundary null when none\n"
      "evidence_id is run/eEEEE-aAAAAAAAAAA; telemetry and tensor-set ids are of one stage each\n"
      "canonical form: keys sorted, no space, real numbers as the bits of a binary64\n";
  return text;
}

const std::string_view kContractId =
    "training-incident-contract@sha256:7601653dc697f74cc4dc7a82341a063456a4fd8e71c340d5d8190e2025add0bf";

std::string tensor_set_id(const StageReport& stage) {
  Digest digest;
  digest.add(stage.name).add(stage.observations);
  for (const std::string& name : stage.names) digest.add(name);
  return digest.id(kTensorSetIdPrefix);
}

std::string telemetry_id(const Report& report, const StageReport& stage) {
  return Digest()
      .add(report.run)
      .add(report.epoch)
      .add(report.attempt)
      .add(stage.name)
      .add(stage.status)
      .add(stage.probe_source)
      .add(stage.tensor_set_id)
      .add(stage.dtype.value_or(std::string(kNone)))
      .add(stage.total)
      .add(stage.nan)
      .add(stage.pos_inf)
      .add(stage.neg_inf)
      .add(stage.finite_abs_max ? bits(*stage.finite_abs_max) : bits(-1))
      .add(stage.scaled ? "scaled" : "as it is")
      .id(kTelemetryIdPrefix);
}

std::string probe_sources_digest(const Report& report) {
  Digest digest;
  for (const StageReport& stage : report.stages) {
    digest.add(stage.name).add(stage.probe_source).add(stage.telemetry_id);
  }
  return digest.id(kDigestPrefix);
}

std::string evidence_id(const std::string& run, std::uint64_t epoch, std::uint64_t attempt) {
  return run + "/" + GenerationId{epoch, attempt}.name();
}

std::string_view stage_of_report(std::string_view stage_of_attempt) {
  return stage_of_attempt == "reduction" ? std::string_view("backward") : stage_of_attempt;
}

std::string_view action_of(std::string_view earliest) {
  const auto found = std::ranges::find(kStageRules, earliest, &StageRule::name);
  return found == kStageRules.end() ? kNoAction : found->action;
}

std::string text_of(std::string_view bytes) {
  std::string text = printable(bytes);
  if (!is_utf8(text)) {
    // Byte by byte: every one that is no ASCII is then shown, so that nothing is guessed.
    std::string shown;
    for (const char c : text) {
      const auto byte = static_cast<unsigned char>(c);
      shown += byte < 0x80 ? std::string(1, c) : fmt::format("\\x{:02x}", byte);
    }
    text = std::move(shown);
  }
  if (text.size() <= kLongestText) return text;
  constexpr std::string_view kCut = "...";
  std::size_t size = kLongestText - kCut.size();
  while (size > 0 && (static_cast<unsigned char>(text[size]) & 0xc0) == 0x80) --size;  // whole characters
  return text.substr(0, size) + std::string(kCut);
}

bool is_text(std::string_view text) { return text_of(text) == text; }

}  // namespace holdfast::incident_contract
