#include "cli/incident_validate.h"

#include <cstdio>
#include <fstream>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "holdfast/coord/evidence/incident_registry.h"

namespace holdfast::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kFooter = R"(
Examples:
  holdfast incident validate runs/long/incidents/e0001-a0000001842/report.json
  holdfast incident validate report.json --json     # {"valid": true, ...}
The report is held to the contract training-incident-v1, wherever it comes from. That its evidence is whole,
`holdfast incident verify` says.
Exit codes: 0 the report is good   1 it is not, and why   64 it cannot be read)";

// More than any report may have: the rest of a larger file is not read.
constexpr std::streamsize kMostBytes = 1 << 20;

struct Arguments {
  std::string file;
  bool json = false;
};

Status read(const std::string& path, std::string* text) {
  std::ifstream file(path, std::ios::binary);
  text->resize(static_cast<std::size_t>(kMostBytes));
  file.read(text->data(), kMostBytes);
  if (!file.is_open() || file.bad() || (file.gcount() == 0 && !file.eof())) {
    return Status::usage("cannot read the report " + path);
  }
  text->resize(static_cast<std::size_t>(file.gcount()));
  return Status();
}

Outcome validate(const Arguments& arguments) {
  std::string text;
  if (Status s = read(arguments.file, &text); !s.ok()) return {s};
  ValidatedIncident incident;
  const Status status = ValidatedIncident::validate(text, &incident);
  const Json* report = nullptr;
  const bool valid = status.ok() && incident.use(&report).ok();
  if (arguments.json) {
    Json json = {{"valid", valid}};
    if (valid) {
      json["evidence_id"] = incident.evidence_id();
      json["evidence_content_id"] = incident.evidence_content_id();
      json["report_content_id"] = incident.report_content_id();
    } else {
      json["reason"] = status.message();
    }
    std::printf("%s\n", json.dump(1, ' ', true, Json::error_handler_t::replace).c_str());
  } else if (valid) {
    // Texts of a report that was taken hold no control characters.
    std::printf("%s is valid: %s, earliest non-finite stage %s, %s\n", incident.evidence_id().c_str(),
                report->at("decision").get_ref<const std::string&>().c_str(),
                report->at("earliest_nonfinite_stage").get_ref<const std::string&>().c_str(),
                report->at("action").get_ref<const std::string&>().c_str());
  } else {
    std::fprintf(stderr, "holdfast: %s\n", status.message().c_str());
  }
  return {Status(), false, !valid};
}

}  // namespace

void add_incident_validate(CLI::App* incident, Outcome* outcome) {
  CLI::App* command =
      incident->add_subcommand("validate", "Hold a report.json to the contract training-incident-v1.");
  command->footer(kFooter);
  const auto arguments = std::make_shared<Arguments>();
  command->add_option("FILE", arguments->file, "The report")->required();
  command->add_flag("--json", arguments->json, "For programs: one strict JSON object");
  command->callback([arguments, outcome] { *outcome = validate(*arguments); });
}

}  // namespace holdfast::cli
