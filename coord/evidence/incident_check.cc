// What a report of the contract must be, beyond its fields and their kinds. The order is from the single
// value to what is concluded from all of them, so that the message names the first thing that is wrong and
// not what follows from it.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "holdfast/collectives/record.h"
#include "holdfast/coord/evidence/bundle.h"
#include "incident_contract.h"

namespace holdfast::incident_contract {
namespace {

bool is_digest(std::string_view text, std::string_view prefix) {
  constexpr std::size_t kHexDigits = 64;
  if (!text.starts_with(prefix) || text.size() != prefix.size() + kHexDigits) return false;
  return std::ranges::all_of(text.substr(prefix.size()),
                             [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

std::string not_a_digest(std::string_view field, std::string_view prefix) {
  return fmt::format("{} is not \"{}\" and 64 hexadecimal digits", field, prefix);
}

std::string fault_of_header(const Report& report) {
  if (report.contract_version != kVersion) return fmt::format("contract_version is not \"{}\"", kVersion);
  if (report.contract_id != kContractId) return "contract_content_id is that of another contract";
  if (report.evidence_id != evidence_id(report.run, report.epoch, report.attempt)) {
    return "evidence_id is not that of this run and step";
  }
  if (!is_digest(report.evidence_content_id, kEvidenceIdPrefix)) {
    return not_a_digest("evidence_content_id", kEvidenceIdPrefix);
  }
  if (report.decision != kHold && report.decision != kContinue) {
    return fmt::format("decision is neither \"{}\" nor \"{}\"", kHold, kContinue);
  }
  if (report.root_cause_claim != kRootCauseClaim) {
    return fmt::format("root_cause_claim is not \"{}\"", kRootCauseClaim);
  }
  if (!is_digest(report.report_id, kReportIdPrefix))
    return not_a_digest("report_content_id", kReportIdPrefix);
  return "";
}

std::string fault_of_bindings(const Report& report) {
  for (std::size_t i = 0; i < kBindings.size(); ++i) {
    const Binding& binding = report.bindings[i];
    if (binding.recorded() && !is_digest(binding.digest, kDigestPrefix)) {
      return not_a_digest(fmt::format("bindings.{}.digest", kBindings[i]), kDigestPrefix);
    }
  }
  if (!report.probe_sources.recorded()) return "bindings.probe_sources is not recorded";
  int exponent = 0;
  if (std::frexp(report.loss_scale, &exponent) != 0.5) {
    return "bindings.loss_scale.value is no finite power of two";
  }
  if (report.loss_scale < kSmallestLossScale || report.loss_scale > kLargestLossScale) {
    return "bindings.loss_scale.value is not within 2^-24 and 2^24";
  }
  return "";
}

std::string fault_of_counts(const StageReport& stage) {
  // The caps come first: below them no sum wraps.
  if (std::max({stage.total, stage.finite, stage.nonfinite, stage.nan, stage.pos_inf, stage.neg_inf}) >
      kMostInStage) {
    return "counts more work than a stage may have, 2^44 - 1";
  }
  if (stage.observations > kMostObservations) {
    return "tensor_set.observations is more work than a stage may have, 2^20";
  }
  if (stage.total != stage.finite + stage.nonfinite) return "total is not finite + nonfinite";
  if (stage.nonfinite != stage.nan + stage.pos_inf + stage.neg_inf) {
    return "nonfinite is not nan + pos_inf + neg_inf";
  }
  if (stage.total > 0 && stage.observations == 0) return "total counts values of no tensor";
  return "";
}

std::string fault_of_magnitude(const StageReport& stage, const DtypeRule& dtype) {
  if (stage.nonfinite > 0 && !dtype.has_nonfinite) return "nonfinite counts values that dtype has not";
  if (stage.finite_abs_max.has_value() != (stage.finite > 0)) {
    return "finite_abs_max is null without finite being 0, or the reverse";
  }
  if (!stage.finite_abs_max) return "";
  const double magnitude = *stage.finite_abs_max;
  if (std::signbit(magnitude)) return "finite_abs_max is negative";
  if (!(magnitude <= dtype.largest)) return "finite_abs_max is above the largest value of dtype";
  if (magnitude > 0 && magnitude < dtype.smallest) return "finite_abs_max is below the resolution of dtype";
  return "";
}

std::string fault_of_names(const StageReport& stage) {
  if (stage.names.size() > stage.observations) return "tensor_set.names has more names than observations";
  for (std::size_t i = 1; i < stage.names.size(); ++i) {
    if (stage.names[i] == stage.names[i - 1]) return "tensor_set.names has a name twice";
    if (stage.names[i] < stage.names[i - 1]) return "tensor_set.names is not sorted";
  }
  return "";
}

std::string fault_of_stage(const StageReport& stage, const StageRule& rule) {
  if (stage.name != rule.name) return fmt::format("stage is not \"{}\"", rule.name);
  if (stage.status != kObserved && stage.status != kNotRun) {
    return fmt::format("status is neither \"{}\" nor \"{}\"", kObserved, kNotRun);
  }
  const bool known = stage.probe_source == kNone ||
                     std::ranges::find(rule.probe_sources, stage.probe_source) != rule.probe_sources.end();
  if (!known) return "probe_source is none of this stage's";
  if (std::string fault = fault_of_counts(stage); !fault.empty()) return fault;
  if (stage.status == kNotRun && stage.observations > 0)
    return "status is NOT_RUN, and something was measured";
  if ((stage.probe_source == kNone) != (stage.observations == 0)) {
    return "probe_source is \"none\" without tensor_set.observations being 0, or the reverse";
  }
  if (std::string fault = fault_of_names(stage); !fault.empty()) return fault;
  if (stage.dtype.has_value() != (stage.observations > 0)) {
    return "dtype is null without tensor_set.observations being 0, or the reverse";
  }
  if (!stage.dtype) {
    if (stage.scaled) return "scaled is true of nothing";
    return stage.finite_abs_max ? "finite_abs_max is one of nothing" : "";
  }
  const DtypeRule* dtype = find_dtype(*stage.dtype);
  return dtype == nullptr ? "dtype is unknown" : fault_of_magnitude(stage, *dtype);
}

// What the stages say together.
std::string fault_of_order(const Report& report) {
  std::uint64_t total = 0;
  bool dirty = false;
  bool ended = false;
  for (std::size_t i = 0; i < report.stages.size(); ++i) {
    const StageReport& stage = report.stages[i];
    total += stage.total;
    const bool not_run = stage.status == kNotRun;
    if (not_run && !dirty)
      return fmt::format("stages[{}].status is NOT_RUN with nothing non-finite before", i);
    if (!not_run && ended)
      return fmt::format("stages[{}].status is OBSERVED after a stage that was not run", i);
    ended = ended || not_run;
    dirty = dirty || stage.nonfinite > 0;
    for (std::size_t j = 0; j < i; ++j) {
      if (stage.telemetry_id == report.stages[j].telemetry_id) {
        return fmt::format("stages[{}].telemetry_id is that of stages[{}], too", i, j);
      }
      if (stage.tensor_set_id == report.stages[j].tensor_set_id) {
        return fmt::format("stages[{}].tensor_set.id is that of stages[{}], too", i, j);
      }
    }
  }
  return total > kMostInReport ? "stages count more work than a report may have, 2^45" : "";
}

std::string fault_of_conclusion(const Report& report) {
  const auto first =
      std::ranges::find_if(report.stages, [](const auto& stage) { return stage.nonfinite > 0; });
  const std::string_view earliest = first == report.stages.end() ? kNone : std::string_view(first->name);
  if (report.earliest != earliest) {
    return fmt::format("earliest_nonfinite_stage is not \"{}\", which the counts say", earliest);
  }
  if (report.action != action_of(earliest)) {
    return fmt::format("action is not \"{}\", which belongs to that stage", action_of(earliest));
  }
  if (report.boundary.has_value() != (first != report.stages.end())) {
    return "boundary is null without earliest_nonfinite_stage being \"none\", or the reverse";
  }
  if (!report.boundary) return "";
  Stage stage = Stage::kInput;
  if (!parse_stage(report.boundary->stage, &stage) || stage_of_report(report.boundary->stage) != earliest) {
    return "boundary.stage is not within earliest_nonfinite_stage";
  }
  if (report.boundary->rank > kLargestRank) return "boundary.rank is above 2^20 - 1";
  return "";
}

std::string fault_of_identities(const Report& report) {
  for (std::size_t i = 0; i < report.stages.size(); ++i) {
    const StageReport& stage = report.stages[i];
    if (stage.tensor_set_id != tensor_set_id(stage)) {
      return fmt::format("stages[{}].tensor_set.id is not that of its tensors", i);
    }
    if (stage.telemetry_id != telemetry_id(report, stage)) {
      return fmt::format("stages[{}].telemetry_id is not that of its measurement", i);
    }
  }
  if (report.probe_sources.digest != probe_sources_digest(report)) {
    return "bindings.probe_sources.digest is not that of the stages";
  }
  return "";
}

}  // namespace

std::string fault_of(const Report& report) {
  if (std::string fault = fault_of_header(report); !fault.empty()) return fault;
  if (std::string fault = fault_of_bindings(report); !fault.empty()) return fault;
  for (std::size_t i = 0; i < report.stages.size(); ++i) {
    if (std::string fault = fault_of_stage(report.stages[i], kStageRules[i]); !fault.empty()) {
      return fmt::format("stages[{}].{}", i, fault);
    }
  }
  if (std::string fault = fault_of_order(report); !fault.empty()) return fault;
  if (std::string fault = fault_of_conclusion(report); !fault.empty()) return fault;
  return fault_of_identities(report);
}

}  // namespace holdfast::incident_contract
