#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/incident_validate.h"
#include "holdfast/collectives/record.h"
#include "holdfast/coord/event_log.h"
#include "holdfast/coord/evidence/bundle.h"
#include "holdfast/coord/evidence/evidence.pb.h"
#include "holdfast/coord/evidence/manifest_json.h"
#include "holdfast/coord/printable.h"
#include "holdfast/coord/run_folder.h"

namespace holdfast::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kFooter = R"(
A bundle is what is kept of an incident, in RUN_DIR/incidents: what was measured and where, and of the first incidents the
tensors that make it happen again. It is clean when every byte of every file is what was written.
Examples:
  holdfast incident list runs/long
  holdfast incident show runs/long/incidents/e0001-a0000001842
  holdfast incident verify runs/long                        # all bundles of a run
  holdfast incident verify runs/long/incidents/e0001-a0000001842
  holdfast incident validate runs/long/incidents/e0001-a0000001842/report.json
Exit codes: 0 shown, and what was verified is clean   1 `verify` found a bundle that is not clean, or `show` one that cannot
            be read   64 usage, or no run or bundle there)";

struct Arguments {
  std::string path;
  bool json = false;
};

void print_json(const Json& json) {
  fmt::print("{}\n", json.dump(1, ' ', true, Json::error_handler_t::replace));
}

bool is_bundle(const std::string& path) {
  FileSystem& files = real_file_system();
  if (files.kind(path) != FileKind::kFolder) return false;
  if (files.exists(path + "/manifest.pb")) return true;
  std::string_view name = path;
  while (name.ends_with('/')) name.remove_suffix(1);
  GenerationId id;
  return parse_generation_name(name.substr(name.rfind('/') + 1), &id);
}

// The bundles of a run, by their paths. USAGE when there is no run.
Status bundles_of(const std::string& run_dir, std::vector<std::string>* paths) {
  FileSystem& files = real_file_system();
  const std::string incidents = incidents_path(run_dir);
  if (!files.exists(incidents) && !RunFolder::holds_record(run_dir)) {
    return Status::usage("there is no run in " + run_dir);
  }
  std::vector<GenerationId> ids;
  if (Status s = list_bundles(files, incidents, &ids); !s.ok()) return Status::usage(s.message());
  for (const GenerationId& id : ids) paths->push_back(incidents + "/" + id.name());
  return Status();
}

std::string name_of(const std::string& path) { return path.substr(path.rfind('/') + 1); }

std::string stage_of(const BundleManifest& manifest) {
  return manifest.has_stage() ? std::string(stage_name(static_cast<Stage>(manifest.stage()))) : "";
}

std::string place_of(const IncidentOrigin& origin) {
  return fmt::format("rank {} ({}) in {}[{}]", origin.rank(), printable(origin.host()),
                     printable(origin.tensor()), origin.index());
}

Json listed(const std::string& path) {
  std::unique_ptr<Bundle> bundle;
  const Status status = Bundle::open(real_file_system(), path, &bundle);
  Json json = {{"incident", name_of(path)}, {"readable", status.ok()}};
  if (!status.ok()) {
    json["fault"] = printable(status.message());
    return json;
  }
  const BundleManifest& manifest = bundle->manifest();
  json["time"] = manifest.time();
  json["kind"] = manifest.kind();
  json["stage"] = manifest.has_stage() ? Json(stage_of(manifest)) : Json();
  json["action"] = manifest.action();
  json["origins"] = Json::array();
  for (const IncidentOrigin& origin : manifest.origins()) {
    json["origins"].push_back({{"rank", origin.rank()},
                               {"host", origin.host()},
                               {"tensor", origin.tensor()},
                               {"index", origin.index()}});
  }
  json["compact"] = manifest.compact();
  json["content_id"] = bundle->content_id();
  return json;
}

std::string shown(const Json& value) {
  return value.is_string() ? printable(value.get_ref<const std::string&>()) : "-";
}

void print_row(const Json& row) {
  if (!row["readable"].get<bool>()) {
    fmt::print("{:<20} cannot be read: {}\n", shown(row["incident"]), shown(row["fault"]));
    return;
  }
  std::string where = "-";
  if (!row["origins"].empty()) {
    const Json& first = row["origins"].front();
    where = fmt::format("rank {} in {}[{}]", first["rank"].get<int>(), shown(first["tensor"]),
                        first["index"].get<std::uint64_t>());
    if (row["origins"].size() > 1) where += fmt::format(", and {} more", row["origins"].size() - 1);
  }
  fmt::print("{:<20} {:<24}  {:<13} {:<9}  {:<9} {:<7}  {}\n", shown(row["incident"]), shown(row["time"]),
             shown(row["kind"]), shown(row["stage"]), shown(row["action"]),
             row["compact"].get<bool>() ? "compact" : "full", where);
}

Status list(const Arguments& arguments) {
  std::vector<std::string> paths;
  if (Status s = bundles_of(arguments.path, &paths); !s.ok()) return s;
  Json rows = Json::array();
  for (const std::string& path : paths) rows.push_back(listed(path));
  if (arguments.json) {
    print_json({{"run_dir", arguments.path}, {"incidents", rows}});
    return Status();
  }
  if (rows.empty()) fmt::print("no incidents in {}\n", printable(incidents_path(arguments.path)));
  for (const Json& row : rows) print_row(row);
  return Status();
}

// Paths are as they were typed.
Outcome verify(const Arguments& arguments) {
  std::vector<std::string> paths;
  if (is_bundle(arguments.path)) {
    paths.push_back(arguments.path);
  } else if (Status s = bundles_of(arguments.path, &paths); !s.ok()) {
    return {s};
  }
  Json rows = Json::array();
  std::size_t clean = 0;
  for (const std::string& path : paths) {
    std::unique_ptr<Bundle> bundle;
    std::vector<std::string> faults;
    if (Status s = Bundle::open(real_file_system(), path, &bundle); !s.ok()) {
      faults.push_back(printable(s.message()));
    } else {
      faults = bundle->verify();
    }
    clean += faults.empty() ? 1 : 0;
    rows.push_back({{"bundle", path},
                    {"clean", faults.empty()},
                    {"content_id", bundle ? Json(bundle->content_id()) : Json()},
                    {"faults", faults}});
    if (arguments.json) continue;
    fmt::print("{}: {}\n", printable(path), faults.empty() ? "clean, " + bundle->content_id() : "NOT CLEAN");
    for (const std::string& fault : faults) fmt::print("  fault: {}\n", fault);
    std::fflush(stdout);  // the next one may take minutes
  }
  const bool all_clean = clean == paths.size();
  if (arguments.json) {
    print_json({{"path", arguments.path}, {"clean", all_clean}, {"bundles", rows}});
  } else {
    fmt::print("{} of {} clean\n", clean, paths.size());
  }
  return {Status(), false, !all_clean};
}

void print_part(const EvidencePart& part) {
  fmt::print("rank {} ({}){}\n", part.rank(), printable(part.host()), part.is_origin() ? ", an origin" : "");
  if (part.has_first_dirty()) {
    fmt::print("  boundary: last clean {}, first dirty {}\n",
               part.has_last_clean() ? printable(part.last_clean()) : "none", printable(part.first_dirty()));
  }
  for (const EvidenceTensor& tensor : part.tensors()) {
    const std::vector<std::uint64_t> shape(tensor.shape().begin(), tensor.shape().end());
    fmt::print("  {:<6} {:<40} {:<8} {:<16} {:>12}\n", EvidenceTensor::Role_Name(tensor.role()),
               printable(tensor.name()), tensor.dtype(), Json(shape).dump(), tensor.bytes());
  }
  for (const Omitted& omitted : part.omitted()) {
    fmt::print("  left out: {}, {} bytes: {}\n", printable(omitted.what()), omitted.bytes(),
               printable(omitted.why()));
  }
  if (part.has_failure()) fmt::print("  failed: {}\n", printable(part.failure()));
}

void print_examination(const CrossExamination& of) {
  const auto found = [](bool there, bool again) {
    return !there ? "not told" : again ? "found" : "not found";
  };
  fmt::print("cross-examination: {}{}\n", CrossExamination::Outcome_Name(of.outcome()),
             of.has_why() ? ": " + printable(of.why()) : "");
  fmt::print("  origin: rank {} ({}): {}\n", of.origin(), printable(of.origin_device()),
             found(of.has_origin_found(), of.origin_found()));
  if (!of.has_examiner()) return;
  fmt::print("  examiner: rank {} ({}), {}: {}\n", of.examiner(), printable(of.examiner_device()),
             CrossExamination::Where_Name(of.where()), found(of.has_examiner_found(), of.examiner_found()));
}

void print(const Bundle& bundle) {
  const BundleManifest& manifest = bundle.manifest();
  fmt::print("epoch {}, attempt {}, {} updates before it, {} ranks, {}, by version {}\n{}\n",
             manifest.epoch(), manifest.attempt(), manifest.update(), manifest.ranks(),
             printable(manifest.time()), printable(manifest.library()), bundle.content_id());
  fmt::print("{}{}: {} NaN, {} +Inf, {} -Inf; loss {}\n", printable(manifest.kind()),
             manifest.has_stage() ? " at " + stage_of(manifest) : "", manifest.nan(), manifest.pos_inf(),
             manifest.neg_inf(), manifest.has_loss() ? json_number(manifest.loss()).dump() : "not known");
  if (manifest.has_error()) fmt::print("error: {}\n", printable(manifest.error()));
  fmt::print("action: {}: {}\n", printable(manifest.action()), printable(manifest.reason()));
  for (const IncidentOrigin& origin : manifest.origins()) fmt::print("origin: {}\n", place_of(origin));
  for (const std::string& fault : manifest.injected())
    fmt::print("put in on purpose: {}\n", printable(fault));
  if (manifest.has_cross_examination()) print_examination(manifest.cross_examination());
  for (const EvidencePart& part : manifest.parts()) print_part(part);
}

Outcome show(const Arguments& arguments) {
  if (!is_bundle(arguments.path)) return {Status::usage("there is no bundle in " + arguments.path)};
  std::unique_ptr<Bundle> bundle;
  if (Status s = Bundle::open(real_file_system(), arguments.path, &bundle); !s.ok()) {
    std::fprintf(stderr, "holdfast: %s\n", printable(s.message()).c_str());
    return {Status(), false, true};
  }
  if (arguments.json) {
    print_json(manifest_json(bundle->manifest(), bundle->content_id()));
  } else {
    print(*bundle);
  }
  return {};
}

CLI::App* add(CLI::App* incident, const char* name, const char* about, const char* argument, const char* what,
              const std::shared_ptr<Arguments>& arguments) {
  CLI::App* command = incident->add_subcommand(name, about);
  command->footer(kFooter);
  command->add_option(argument, arguments->path, what)->required();
  command->add_flag("--json", arguments->json, "For programs: one strict JSON object");
  return command;
}

}  // namespace

void add_incident(CLI::App* app, Outcome* outcome) {
  CLI::App* incident =
      app->add_subcommand("incident", "Look at what is kept of a run's incidents, and verify it.");
  incident->require_subcommand(1);
  incident->footer(kFooter);
  const auto arguments = std::make_shared<Arguments>();
  add(incident, "list", "Show which incidents there are.", "RUN_DIR", "Folder of the run", arguments)
      ->callback([arguments, outcome] { outcome->status = list(*arguments); });
  add(incident, "show", "Show what a bundle holds.", "BUNDLE", "Folder of the incident", arguments)
      ->callback([arguments, outcome] { *outcome = show(*arguments); });
  add(incident, "verify", "Read every byte of a bundle, or of all of a run, and judge it.", "PATH",
      "Folder of the run or of an incident", arguments)
      ->callback([arguments, outcome] { *outcome = verify(*arguments); });
  add_incident_validate(incident, outcome);
}

}  // namespace holdfast::cli
