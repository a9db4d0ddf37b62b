// For who takes incident reports from elsewhere: one that was validated, and a memory of those that came
// before.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "holdfast/collectives/status.h"

namespace holdfast {

// A report that validate_incident_report() took. Cannot be changed; copies share it. Safe to read from many
// threads.
class ValidatedIncident {
 public:
  // USAGE as validate_incident_report(); `*out` is then empty.
  static Status validate(const std::string& text, ValidatedIncident* out);

  const std::string& evidence_id() const { return evidence_id_; }
  const std::string& evidence_content_id() const { return evidence_content_id_; }
  const std::string& report_content_id() const { return report_content_id_; }

  // Gives the report, which lives as long as this does, after its content id was computed again: USAGE when
  // it is another by now, or when nothing was validated.
  Status use(const nlohmann::ordered_json** report) const;

 private:
  std::shared_ptr<const nlohmann::ordered_json> report_;
  std::string evidence_id_;
  std::string evidence_content_id_;
  std::string report_content_id_;
};

// Refuses an evidence id that comes again with another content. Not thread-safe.
class IncidentRegistry {
 public:
  // `most` evidence ids are kept in mind; a further one is refused, since it could not be held to what it
  // said.
  explicit IncidentRegistry(std::size_t most = 65536) : most_(most) {}

  // USAGE as validate_incident_report(), and for an evidence id that is known with another content id.
  Status admit(const std::string& text, ValidatedIncident* out);

 private:
  struct Ids {
    std::string evidence;
    std::string report;
  };
  const std::size_t most_;
  std::map<std::string, Ids> known_;
};

}  // namespace holdfast
