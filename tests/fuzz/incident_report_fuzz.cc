// Whatever is taken for an incident report says what the contract asks for, and reads the same when it is
// written again.
//
// Nothing found at random has a right content id. So the input is given one, too; and it is taken for a
// manifest, of which a report is made: each that is made is taken.
#include <cstdint>
#include <string>
#include <string_view>

#include "fuzz/expect.h"
#include "holdfast/coord/evidence/evidence.pb.h"
#include "holdfast/coord/evidence/incident_report.h"
#include "holdfast/coord/storage/sha256.h"

namespace holdfast {
namespace {

using Json = nlohmann::ordered_json;

void check_stages(const Json& report) {
  bool dirty = false;
  std::string earliest = "none";
  for (const Json& stage : report.at("stages")) {
    const auto number = [&](const char* name) { return stage.at(name).get<std::uint64_t>(); };
    EXPECT(number("total") == number("finite") + number("nonfinite"));
    EXPECT(number("nonfinite") == number("nan") + number("pos_inf") + number("neg_inf"));
    EXPECT(stage.at("status") == "OBSERVED" || dirty);
    if (number("nonfinite") > 0 && !dirty) earliest = stage.at("stage");
    dirty = dirty || number("nonfinite") > 0;
  }
  EXPECT(report.at("earliest_nonfinite_stage") == earliest);
}

bool fuzz_text(const std::string& text) {
  if (!validate_incident_report(text).ok()) return false;
  const Json report = Json::parse(text);
  check_stages(report);
  EXPECT(validate_incident_report(report.dump(2)).ok());
  EXPECT(validate_incident_report(nlohmann::json(report).dump(-1, ' ', true)).ok());
  return true;
}

void fuzz_sealed(const std::string& text) {
  Json report = Json::parse(text, nullptr, false);
  if (!report.is_object() || text.size() > (128 << 10)) return;
  report["report_content_id"] =
      "training-incident-report@sha256:" + hex(sha256(canonical_incident_report(report)));
  fuzz_text(report.dump(-1, ' ', false, Json::error_handler_t::replace));
}

void fuzz_manifest(const std::string& bytes) {
  BundleManifest manifest;
  if (!manifest.ParseFromString(bytes)) return;
  const std::string content_id = "training-incident-evidence@sha256:" + std::string(64, '0');
  const std::string markdown = incident_report_markdown(manifest, content_id, bytes);
  for (const char c : markdown) EXPECT(c == '\n' || static_cast<unsigned char>(c) >= 0x20);
  EXPECT(markdown.find('<') == std::string::npos);
  Json report;
  if (!make_incident_report(manifest, content_id, &report).ok()) {
    EXPECT(report.is_null());
    return;
  }
  EXPECT(fuzz_text(report.dump()));
}

}  // namespace
}  // namespace holdfast

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string bytes(reinterpret_cast<const char*>(data), size);
  holdfast::fuzz_text(bytes);
  holdfast::fuzz_sealed(bytes);
  holdfast::fuzz_manifest(bytes);
  return 0;
}
