// Rank 0's part: it decides on attempts that are not clean, counts, and keeps the record.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "holdfast/collectives/topology.h"
#include "holdfast/coord/budget.h"
#include "holdfast/coord/calibration.h"
#include "holdfast/coord/decision.h"
#include "holdfast/coord/event_log.h"
#include "holdfast/coord/incident.h"
#include "holdfast/coord/run_folder.h"
#include "holdfast/coord/suspects.h"

namespace holdfast {

class Policy;

// Lives on rank 0 only, for one run. Not thread-safe: the training thread calls it.
class Coordinator {
 public:
  // `run_dir` "" keeps no record. USAGE when the run folder cannot be had.
  static Status create(const Policy& policy, const std::string& run_dir, std::unique_ptr<Coordinator>* out);
  ~Coordinator();

  void run_started(std::uint64_t epoch, Topology topology);
  void run_finished(std::uint64_t epoch, std::uint64_t attempts, std::uint64_t updates);

  // Each clean attempt.
  void update_applied(std::uint64_t epoch, std::uint64_t attempt, std::uint64_t update);

  // Early warnings and changes, for the record only.
  void scale_changed(std::uint64_t epoch, std::uint64_t attempt, std::uint64_t update, double from,
                     double to);
  void spike(std::uint64_t epoch, std::uint64_t attempt, std::uint64_t update, std::string_view name,
             double value, double threshold);
  void headroom(std::uint64_t epoch, std::uint64_t attempt, std::uint64_t update, std::string_view tensor,
                double abs_max, double largest);

  // The ranks could not agree, or not be told: this rank leaves by itself.
  void run_broken(std::uint64_t epoch, std::uint64_t attempt, std::uint64_t update, const Decision& decision);

  // Each attempt that is not clean: decides, counts it and puts it on record, before any rank is told.
  Decision handle(const Incident& incident);

 private:
  explicit Coordinator(const Policy& policy);
  Decision decide_and_count(const Incident& incident);
  void charge(std::uint64_t skips, std::uint64_t epoch, std::uint64_t attempt, std::uint64_t update);
  void watch_calibration_rate(std::uint64_t epoch, std::uint64_t attempt, std::uint64_t update);
  void record(const std::string& name, nlohmann::ordered_json fields);
  std::vector<std::string> origin_devices(const Incident& incident) const;
  nlohmann::ordered_json origin_json(const Origin& origin) const;
  nlohmann::ordered_json incident_json(const Incident& incident) const;

  const std::unique_ptr<const Policy> policy_;
  SkipBudget budget_;
  Calibration calibration_;
  bool calibration_alert_ = false;  // raised and not cleared yet
  Suspects suspects_;
  Topology topology_;
  RunFolder folder_;
  EventLog events_;
  bool keeps_record_ = false;
};

}  // namespace holdfast
