// The incident report, contract training-incident-v1: made from a bundle's manifest, and checked wherever it comes from.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "holdfast/collectives/status.h"

namespace holdfast {

class BundleManifest;

// `content_id` is the bundle's. INTERNAL when the manifest does not hold what the contract asks for, such as an `error`
// incident without a non-finite value, which is outside of it.
Status make_incident_report(const BundleManifest& manifest, const std::string& content_id,
                            nlohmann::ordered_json* report);

// For people: what happened, where, what was done about it, what is not known, who owns it, which command to run next.
// Names are escaped for Markdown. Incidents outside of the contract have one, too.
std::string incident_report_markdown(const BundleManifest& manifest, const std::string& content_id,
                                     const std::string& bundle_path);

// Of any text. USAGE with the field and what is wrong, one message for each kind of fault. O(stages).
Status validate_incident_report(const std::string& text);

// The form whose SHA-256 is the report's own content id: see incident_report.cc.
std::string canonical_incident_report(const nlohmann::ordered_json& report);

}  // namespace holdfast
