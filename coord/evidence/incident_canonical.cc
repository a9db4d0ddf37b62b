// The canonical form of a report, under its SHA-256: the report's JSON without the member
// `report_content_id`,
//   - without any space; members of an object in the order of the bytes of their names;
//   - strings in UTF-8 within quotes, with \" for a quote, \\ for a backslash, \u00XX for a byte below 0x20,
//   and nothing
//     else escaped;
//   - integers in decimal; `finite_abs_max` and `value`, and whatever is written with a point or an exponent,
//   as the
//     sixteen hexadecimal digits of an IEEE 754 binary64 behind f64:
// It depends on no library's way to print a number, nor on the order in which a report was written.
#include <fmt/format.h>

#include <bit>
#include <map>

#include "holdfast/coord/evidence/incident_report.h"
#include "holdfast/coord/storage/sha256.h"
#include "incident_contract.h"

namespace holdfast {
namespace {

using Json = nlohmann::ordered_json;

void append_text(std::string_view text, std::string* out) {
  *out += '"';
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      *out += '\\';
      *out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      *out += fmt::format("\\u{:04x}", static_cast<unsigned>(c));
    } else {
      *out += c;
    }
  }
  *out += '"';
}

void append(const Json& json, bool real, std::string* out) {
  if (json.is_object()) {
    std::map<std::string_view, const Json*> members;
    for (const auto& [name, value] : json.get_ref<const Json::object_t&>()) members[name] = &value;
    char before = '{';
    for (const auto& [name, value] : members) {
      *out += std::exchange(before, ',');
      append_text(name, out);
      *out += ':';
      append(*value, name == "finite_abs_max" || name == "value", out);
    }
    *out += members.empty() ? "{}" : "}";
  } else if (json.is_array()) {
    *out += '[';
    for (std::size_t i = 0; i < json.size(); ++i) {
      if (i > 0) *out += ',';
      append(json[i], false, out);
    }
    *out += ']';
  } else if (json.is_string()) {
    append_text(json.get_ref<const std::string&>(), out);
  } else if (json.is_number_float() || (real && json.is_number())) {
    *out += fmt::format("f64:{:016x}", std::bit_cast<std::uint64_t>(json.get<double>()));
  } else {
    *out += json.dump();  // null, true, false, an integer
  }
}

}  // namespace

std::string canonical_incident_report(const Json& report) {
  Json without = report;
  if (without.is_object()) without.erase("report_content_id");
  std::string text;
  append(without, false, &text);
  return text;
}

std::string incident_contract::report_id(const Json& report) {
  return std::string(kReportIdPrefix) + hex(sha256(canonical_incident_report(report)));
}

}  // namespace holdfast
