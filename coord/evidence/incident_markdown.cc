// report.md: for a person, at night, with nothing else at hand. Whatever does not come from this program is
// in code spans.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "holdfast/collectives/record.h"
#include "holdfast/collectives/status.h"
#include "holdfast/coord/evidence/evidence.pb.h"
#include "holdfast/coord/evidence/incident_report.h"
#include "holdfast/coord/generation_id.h"
#include "incident_contract.h"
#include "markdown_text.h"

namespace holdfast {
namespace {

// A screen: what is left out is in manifest.json.
constexpr int kMostRows = 20;

std::string stage_text(bool there, int stage) {
  const bool known = there && stage >= 0 && stage < kStageCount;
  return known ? fmt::format("`{}`", stage_name(static_cast<Stage>(stage))) : "(none)";
}

std::string classes(std::uint64_t nan, std::uint64_t pos_inf, std::uint64_t neg_inf) {
  return fmt::format("{} NaN, {} +Inf, {} -Inf", nan, pos_inf, neg_inf);
}

std::string number(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "+Inf" : "-Inf";
  return fmt::format("{}", value);
}

std::string micro_batch(int index) { return index < 0 ? "all" : fmt::format("{}", index); }

// `total` rows, of which at most kMostRows were printed.
std::string left_out(int total) {
  return total > kMostRows ? fmt::format("\n{} more are in manifest.json.\n", total - kMostRows) : "";
}

std::string place(const IncidentOrigin& origin) {
  std::string text = fmt::format("rank {} (host {}, device {}), in tensor {} at flat index {}", origin.rank(),
                                 code_span(origin.host()), code_span(origin.device()),
                                 code_span(origin.tensor()), origin.index());
  if (origin.micro_batch() >= 0) text += fmt::format(", micro-batch {}", origin.micro_batch());
  return text;
}

std::string exit_text(int code) {
  return fmt::format("{} ({})", code, status_code_name(static_cast<StatusCode>(code)));
}

std::string done_text(const BundleManifest& manifest) {
  const std::string& action = manifest.action();
  if (action == "SKIP")
    return "All ranks skipped the attempt: no update was applied, and its batch was dropped. The run went "
           "on.";
  if (action == "ROLL_BACK") return "All ranks went back to an earlier checkpoint.";
  if (action == "ABORT") {
    return "The guard ended the run on all ranks" +
           (manifest.has_exit_code() ? ", exit code " + exit_text(manifest.exit_code()) : std::string()) +
           ".";
  }
  return "What was decided was not recorded.";
}

std::string summary(const BundleManifest& manifest) {
  const std::uint64_t total = manifest.nan() + manifest.pos_inf() + manifest.neg_inf();
  std::string text;
  if (total > 0) {
    text = fmt::format("**{} non-finite value{}** ({}) at stage {}", total, total == 1 ? "" : "s",
                       classes(manifest.nan(), manifest.pos_inf(), manifest.neg_inf()),
                       stage_text(manifest.has_stage(), manifest.stage()));
    if (manifest.origins_size() > 0) text += ", first seen on " + place(manifest.origins(0));
  } else if (manifest.kind() == "DIVERGED") {
    text = "**The replicas differ**: " + code_span(manifest.reason(), 1000);
  } else if (!manifest.error().empty()) {
    text = "**An exception**, without a non-finite value: " + code_span(manifest.error(), 1000);
  } else {
    text = "**Not clean, without a non-finite value**: " + code_span(manifest.reason(), 1000);
  }
  return text + ". " + done_text(manifest) + "\n";
}

std::string what_happened(const BundleManifest& manifest, const std::string& content_id) {
  std::string text = "\n## What happened\n\n| | |\n|---|---|\n";
  const auto row = [&](std::string_view name, const std::string& value) {
    text += fmt::format("| {} | {} |\n", name, value);
  };
  row("kind", code_span(manifest.kind()));
  row("time", code_span(manifest.time()));
  row("run", code_span(manifest.run()));
  row("epoch, attempt, update",
      fmt::format("{}, {}, {}", manifest.epoch(), manifest.attempt(), manifest.update()));
  row("ranks", fmt::format("{}", manifest.ranks()));
  row("earliest stage", stage_text(manifest.has_stage(), manifest.stage()));
  row("non-finite there, over all ranks", classes(manifest.nan(), manifest.pos_inf(), manifest.neg_inf()));
  row("loss of the first origin", manifest.has_loss() ? number(manifest.loss()) : "(none)");
  row("loss scale", number(manifest.loss_scale()));
  if (!manifest.error().empty()) row("first exception", code_span(manifest.error(), 1000));
  row("reason", code_span(manifest.reason(), 1000));
  for (int i = 0; i < std::min(manifest.injected_size(), kMostRows); ++i) {
    row("fault put in on purpose", code_span(manifest.injected(i)));
  }
  row("evidence", code_span(content_id));
  return text + left_out(manifest.injected_size());
}

std::string origins_table(const BundleManifest& manifest) {
  if (manifest.origins_size() == 0) return "No rank named a tensor.\n";
  std::string text =
      "| rank | host | device | stage | first bad tensor | flat index | micro-batch | classes | device "
      "suspect |\n"
      "|---|---|---|---|---|---|---|---|---|\n";
  for (int i = 0; i < std::min(manifest.origins_size(), kMostRows); ++i) {
    const IncidentOrigin& o = manifest.origins(i);
    text += fmt::format("| {} | {} | {} | {} | {} | {} | {} | {} | {} |\n", o.rank(), code_span(o.host()),
                        code_span(o.device()), stage_text(o.has_stage(), o.stage()), code_span(o.tensor()),
                        o.index(), micro_batch(o.micro_batch()), classes(o.nan(), o.pos_inf(), o.neg_inf()),
                        o.hardware_suspect() ? "**yes**" : "no");
  }
  return text + left_out(manifest.origins_size());
}

std::string stages_table(const EvidencePart& part) {
  if (part.stages_size() == 0) return "";
  std::string text = fmt::format(
      "\nRank {} observed in the attempt itself:\n\n"
      "| stage | measurements | values | NaN | +Inf | -Inf | finite abs-max | dtype "
      "|\n|---|---|---|---|---|---|---|---|\n",
      part.rank());
  for (int i = 0; i < std::min(part.stages_size(), kMostRows); ++i) {
    const StageTotal& s = part.stages(i);
    text += fmt::format("| {} | {} | {} | {} | {} | {} | {}{} | {} |\n", stage_text(s.has_stage(), s.stage()),
                        s.tensors(), s.elements(), s.nan(), s.pos_inf(), s.neg_inf(), number(s.abs_max()),
                        s.scaled() ? " (scaled)" : "", code_span(s.dtype()));
  }
  return text + "\nA stage that is not listed was not run, or was not shown to the guard.\n" +
         left_out(part.stages_size());
}

// The rows around the first tensor that is dirty; the beginning when none is.
int first_row(const EvidencePart& part) {
  const auto dirty = std::ranges::find_if(
      part.layers(), [](const auto& probe) { return probe.nan() + probe.pos_inf() + probe.neg_inf() > 0; });
  if (dirty == part.layers().end()) return 0;
  const int at = static_cast<int>(dirty - part.layers().begin());
  return std::clamp(at - kMostRows / 2, 0, std::max(0, part.layers_size() - kMostRows));
}

std::string layers_table(const EvidencePart& part) {
  if (part.layers_size() == 0) return "";
  const int begin = first_row(part);
  const int end = std::min(begin + kMostRows, part.layers_size());
  std::string text = fmt::format(
      "\nLayer by layer, rows {} to {} of {}:\n\n"
      "| tensor | stage | micro-batch | values | classes | first bad | finite abs-max | finite RMS | dtype "
      "|\n"
      "|---|---|---|---|---|---|---|---|---|\n",
      begin + 1, end, part.layers_size());
  for (int i = begin; i < end; ++i) {
    const TensorProbe& p = part.layers(i);
    text += fmt::format("| {} | {} | {} | {} | {} | {} | {}{} | {} | {} |\n", code_span(p.tensor()),
                        stage_text(p.has_stage(), p.stage()), micro_batch(p.micro_batch()), p.elements(),
                        classes(p.nan(), p.pos_inf(), p.neg_inf()),
                        p.first_bad() < 0 ? "-" : fmt::format("{}", p.first_bad()), number(p.abs_max()),
                        p.scaled() ? " (scaled)" : "", number(p.root_mean_square()), code_span(p.dtype()));
  }
  return text;
}

std::string boundary_text(const EvidencePart& part) {
  if (!part.has_first_dirty() && !part.has_last_clean()) return "";
  return fmt::format("\n**Boundary** on rank {}: last clean {} → first dirty {}.\n", part.rank(),
                     part.has_last_clean() ? code_span(part.last_clean()) : "(nothing before it)",
                     part.has_first_dirty() ? code_span(part.first_dirty()) : "(none)");
}

// Of the layers at the boundary, attempt by attempt.
std::string trend_table(const EvidencePart& part) {
  std::string rows;
  int count = 0;
  for (const LayerAttempt& attempt : part.trend()) {
    for (const TensorProbe& p : attempt.layers()) {
      if (p.tensor() != part.last_clean() && p.tensor() != part.first_dirty()) continue;
      if (++count > kMostRows) continue;
      rows += fmt::format("| {} | {} | {} | {} | {}{} | {} |\n", attempt.epoch(), attempt.attempt(),
                          code_span(p.tensor()), classes(p.nan(), p.pos_inf(), p.neg_inf()),
                          number(p.abs_max()), p.scaled() ? " (scaled)" : "", number(p.root_mean_square()));
    }
  }
  if (count == 0) return "";
  return "\nThe boundary in attempts before it:\n\n| epoch | attempt | tensor | classes | finite abs-max | "
         "finite "
         "RMS |\n|---|---|---|---|---|---|\n" +
         rows + left_out(count);
}

const EvidencePart* first_part(const BundleManifest& manifest) {
  for (const IncidentOrigin& origin : manifest.origins()) {
    const auto part = std::ranges::find(manifest.parts(), origin.rank(), &EvidencePart::rank);
    if (part != manifest.parts().end()) return &*part;
  }
  return manifest.parts_size() > 0 ? &manifest.parts(0) : nullptr;
}

std::string where(const BundleManifest& manifest) {
  std::string text = "\n## Where it was first seen\n\n" + origins_table(manifest);
  if (const EvidencePart* part = first_part(manifest)) {
    text += boundary_text(*part) + stages_table(*part) + layers_table(*part) + trend_table(*part);
  }
  return text;
}

std::string seat(int rank, const std::string& host, const std::string& device) {
  return fmt::format("rank {} (host {}, device {})", rank, code_span(host), code_span(device));
}

std::string where_text(const CrossExamination& by) {
  switch (by.where()) {
    case CrossExamination::OTHER_HOST: return "on another host";
    case CrossExamination::OTHER_DEVICE: return "on another device of the same host";
    case CrossExamination::SAME_HOST:
      return "on the same host, and not known to be another device, so that it speaks for less";
  }
  return "";
}

std::string outcome_text(const CrossExamination& of) {
  switch (of.outcome()) {
    case CrossExamination::DATA_OR_MODEL:
      return "Both found the same value again at the same place: the data or the model is to be looked at, "
             "and not "
             "the device.";
    case CrossExamination::SUSPECT_DEVICE:
      return fmt::format(
          "Only rank {} found it again: the device of rank {} is suspect. Take it out of service and test it "
          "before "
          "it is trusted.",
          of.origin(), of.origin());
    case CrossExamination::TRANSIENT:
      return "Neither found it again: it was transient, or depends on something that is not made again.";
    case CrossExamination::INCONCLUSIVE:
      return fmt::format("Only rank {} found it, and not the rank that had it: nothing follows from that.",
                         of.examiner());
    case CrossExamination::NOT_EXAMINED: break;
  }
  return "";
}

std::string cross_examination(const BundleManifest& manifest) {
  if (!manifest.has_cross_examination()) return "";
  const CrossExamination& of = manifest.cross_examination();
  std::string text = "\n## On another device\n\n";
  if (of.outcome() == CrossExamination::NOT_EXAMINED) {
    return text + fmt::format(
                      "`NOT_EXAMINED`: no other rank could tell whether the attempt of rank {} fails there, "
                      "too: {}.\n",
                      of.origin(), code_span(of.why(), 400));
  }
  text += fmt::format(
      "`{}`: the attempt of {} was made again by itself and, from the same batch and random numbers, "
      "by {}, {}. {} This is evidence, and no proof of a cause.\n",
      CrossExamination::Outcome_Name(of.outcome()), seat(of.origin(), of.origin_host(), of.origin_device()),
      seat(of.examiner(), of.examiner_host(), of.examiner_device()), where_text(of), outcome_text(of));
  return text;
}

std::string what_was_done(const BundleManifest& manifest) {
  std::string text = "\n## What was done\n\n" + done_text(manifest) + "\n";
  if (!manifest.action().empty()) text += "Decision: " + code_span(manifest.action()) + ".\n";
  if (!manifest.generation().empty()) {
    text += fmt::format("The state before it: checkpoint {}, {} attempts earlier.\n",
                        code_span(manifest.generation()), manifest.attempts_since_generation());
    text += manifest.generation_sha256().empty()
                ? "It was not yet known to be on disk; `checkpoint_published` in the run's record has the "
                  "digest of its "
                  "manifest.\n"
                : "SHA-256 of its manifest: " + code_span(manifest.generation_sha256()) + "\n";
  }
  return text;
}

void add_unknowns(const EvidencePart& part, std::vector<std::string>* unknown) {
  if (!part.reran()) {
    unknown->push_back(fmt::format(
        "rank {} did not make its attempt again: which layer it was is not bracketed", part.rank()));
  } else if (part.has_rerun_agrees() && !part.rerun_agrees()) {
    unknown->push_back(
        fmt::format("when rank {} made its attempt again it did not find the same: the fault may be "
                    "transient, or the device's",
                    part.rank()));
  }
  if (!part.failure().empty()) {
    unknown->push_back(fmt::format("rank {} failed to tell: {}", part.rank(), code_span(part.failure())));
  }
  for (const Omitted& omitted : part.omitted()) {
    unknown->push_back(fmt::format("rank {} left out {} ({} bytes): {}", part.rank(),
                                   code_span(omitted.what()), omitted.bytes(), code_span(omitted.why())));
  }
}

std::string what_is_unknown(const BundleManifest& manifest) {
  std::vector<std::string> unknown = {
      "the root cause: where a value was first seen is a symptom's place, and proves no cause"};
  for (const std::string_view name : incident_contract::kBindings) {
    const bool there =
        std::ranges::any_of(manifest.configuration(), [&](const Named& n) { return n.name() == name; });
    if (!there && name != "batch") unknown.push_back(fmt::format("{}: not recorded by the trainer", name));
  }
  if (manifest.compact()) unknown.emplace_back("the tensors: this bundle is compact, without any");
  for (const IncidentOrigin& origin : manifest.origins()) {
    const bool told =
        std::ranges::find(manifest.parts(), origin.rank(), &EvidencePart::rank) != manifest.parts().end();
    if (!told)
      unknown.push_back(
          fmt::format("what rank {} measured: it is an origin and sent nothing", origin.rank()));
  }
  for (const EvidencePart& part : manifest.parts()) {
    if (part.is_origin()) add_unknowns(part, &unknown);
  }
  for (const Omitted& omitted : manifest.omitted()) {
    unknown.push_back(fmt::format("left out {} ({} bytes): {}", code_span(omitted.what()), omitted.bytes(),
                                  code_span(omitted.why())));
  }
  std::string text = "\n## What is not known\n\n";
  for (std::size_t i = 0; i < unknown.size() && i < std::size_t{kMostRows}; ++i)
    text += "- " + unknown[i] + "\n";
  return text + left_out(static_cast<int>(unknown.size()));
}

std::string who_owns_it(const BundleManifest& manifest) {
  return fmt::format("\n## Who owns it\n\n- owner of the run: {}\n- owner of stage {}: {}\n- ticket: {}\n",
                     code_span(manifest.owner()), stage_text(manifest.has_stage(), manifest.stage()),
                     code_span(manifest.stage_owner()), code_span(manifest.ticket()));
}

// Exit codes after which the next start is refused until somebody answers for the run.
bool is_held(const BundleManifest& manifest) {
  const int code = manifest.exit_code();
  return code == static_cast<int>(StatusCode::kBudgetExhausted) ||
         code == static_cast<int>(StatusCode::kLossScaleExhausted) ||
         code == static_cast<int>(StatusCode::kRanksDisagree) ||
         code == static_cast<int>(StatusCode::kNoCleanGeneration);
}

// The bundle is RUN_DIR/incidents/NAME.
std::string run_folder_of(std::string_view bundle) {
  for (int level = 0; level < 2; ++level) {
    const auto slash = bundle.rfind('/');
    if (slash == std::string_view::npos) return ".";
    bundle = bundle.substr(0, slash);
  }
  return bundle.empty() ? "/" : std::string(bundle);
}

std::string next_commands(const BundleManifest& manifest, std::string bundle_path) {
  while (bundle_path.size() > 1 && bundle_path.back() == '/') bundle_path.pop_back();
  std::string bundle;
  std::string run;
  const bool plain = shell_word(bundle_path, &bundle) && shell_word(run_folder_of(bundle_path), &run);
  std::string text = "\n## What to run next\n\n";
  if (!plain) {
    bundle = "PATH";
    run = "RUN_DIR";
    text +=
        "PATH is this bundle's folder, " + code_span(bundle_path, 1000) + "; RUN_DIR is two above it.\n\n";
  }
  text += "```\n";
  text += fmt::format("holdfast incident verify {}     # is the evidence whole?\n", bundle);
  text += fmt::format("guarded_train --replay {}     # does it happen again?\n", bundle);
  text += fmt::format("guarded_train --replay {} --shrink     # which samples does it take?\n", bundle);
  text += fmt::format("guarded_train --replay {} --one-factor     # what makes it go away?\n", bundle);
  if (is_held(manifest)) {
    text += fmt::format(
        "holdfast ack {} --owner WHO --note WHY     # when it is understood: until then no restart\n", run);
  }
  text += "```\n";
  if (manifest.compact()) {
    text += manifest.generation().empty()
                ? "\nThis bundle holds no tensors, and no checkpoint is named: it cannot be replayed.\n"
                : "\nThis bundle holds no tensors: the replay needs the checkpoint that is named above.\n";
  }
  return text;
}

// What report.json concludes, or why there is none.
std::string contract_text(const BundleManifest& manifest, const std::string& content_id) {
  nlohmann::ordered_json report;
  if (const Status s = make_incident_report(manifest, content_id, &report); !s.ok()) {
    return "\nThere is no report.json: " + code_span(s.message(), 400) + ".\n";
  }
  return fmt::format("\nreport.json, by the contract {}: `{}`, `{}`.\n", incident_contract::kVersion,
                     report["decision"].get_ref<const std::string&>(),
                     report["action"].get_ref<const std::string&>());
}

std::string configuration(const BundleManifest& manifest) {
  if (manifest.configuration_size() == 0) return "";
  std::string text = "\n## Configuration\n\n| | |\n|---|---|\n";
  for (int i = 0; i < std::min(manifest.configuration_size(), kMostRows); ++i) {
    const Named& named = manifest.configuration(i);
    text += fmt::format("| {} | {} |\n", code_span(named.name()), code_span(named.value()));
  }
  return text + left_out(manifest.configuration_size());
}

}  // namespace

std::string incident_report_markdown(const BundleManifest& manifest, const std::string& content_id,
                                     const std::string& bundle_path) {
  const std::string name = GenerationId{manifest.epoch(), manifest.attempt()}.name();
  return fmt::format("# Incident {} of run {}\n\n", name, code_span(manifest.run())) + summary(manifest) +
         what_happened(manifest, content_id) + where(manifest) + cross_examination(manifest) +
         what_was_done(manifest) + what_is_unknown(manifest) + who_owns_it(manifest) +
         next_commands(manifest, bundle_path) + contract_text(manifest, content_id) + configuration(manifest);
}

}  // namespace holdfast
