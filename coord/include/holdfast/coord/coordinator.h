// Rank 0's part: it decides on attempts that are not clean, counts, and keeps the record.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "holdfast/collectives/topology.h"
#include "holdfast/coord/budget.h"
#include "holdfast/coord/calibration.h"
#include "holdfast/coord/decision.h"
#include "holdfast/coord/dropped_data.h"
#include "holdfast/coord/event_log.h"
#include "holdfast/coord/generation_id.h"
#include "holdfast/coord/incident.h"
#include "holdfast/coord/metrics.h"
#include "holdfast/coord/metrics_endpoint.h"
#include "holdfast/coord/rate_rules.h"
#include "holdfast/coord/run_folder.h"
#include "holdfast/coord/run_monitor.h"
#include "holdfast/coord/suspects.h"

namespace holdfast {

class BundleManifest;
class EvidencePart;
class EvidenceStore;
class LayerAttempt;
class LayerLog;
class Policy;
class RunState;

// What a run is, for its evidence: by name.
struct RunDescription {
  std::map<std::string, std::string> configuration;
  std::map<std::string, std::string> environment;
  std::vector<std::string> injected;  // faults that are put in on purpose
  bool cross_examines = false;        // a rank can make another's attempt again
};

// A generation that all ranks have loaded.
struct RestoredState {
  GenerationId from;
  std::string manifest_sha256;  // in hexadecimal, of its manifest
  std::uint64_t update = 0;
  std::uint64_t skips = 0;
  std::uint64_t ranks = 0;           // of the run that wrote it
  std::string lineage;               // what Coordinator::lineage() gave for it
  std::vector<std::string> refused;  // newer ones, and why
};

// What became of a generation that was to be written.
struct CheckpointNews {
  GenerationId id;
  bool published = false;
  bool non_finite = false;      // refused for that
  std::string manifest_sha256;  // of a published one, in hexadecimal
  std::string reason;           // why it is not published; or what went wrong beside
  std::uint64_t bytes = 0;
  double seconds = 0;
  std::vector<std::string> removed;  // older ones
};

// Lives on rank 0 only, from the start of a run to its end or the next restart. Not thread-safe: the training
// thread calls it.
class Coordinator {
 public:
  // For a new run. `run_dir` "" keeps no record. USAGE when the run folder cannot be had.
  static Status create(const Policy& policy, const std::string& run_dir, std::unique_ptr<Coordinator>* out);

  // Goes on with the run that RUN_DIR holds: as create(), but with everything it remembers, and at the next
  // epoch. Where there is no run yet it begins one, so that a job can be requeued as it was submitted. USAGE
  // when a live run holds the folder or its memory cannot be read; RESTART_NOT_ACKNOWLEDGED when the run was
  // aborted, or fails again and again, and nobody has acknowledged it.
  static Status resume(const Policy& policy, const std::string& run_dir, std::unique_ptr<Coordinator>* out);
  ~Coordinator();

  // Where the run is: epoch, attempt, update, skips; loss scale, when one was kept.
  const RunState& memory() const { return *memory_; }

  // Asks whether the run folder is still this run's, by what is on disk: RANKS_DISAGREE when it is not. The
  // function may be called on any thread, also when the coordinator is gone.
  std::function<Status()> still_holds() const;

  // Whether another run has the folder: then nothing more is written, and handle() aborts with
  // RANKS_DISAGREE. The first is as of the last write, or of a second ago, and is two loads; the second reads
  // the folder.
  bool taken_over() const { return taken_over_ || monitor_.taken_over(); }
  bool look_for_takeover();

  // What the loss scaler will be after the running attempt, for the run's memory; before its update_applied()
  // or handle(). See LossScaler::State.
  void keep_loss_scale(double scale, std::uint64_t clean_updates, std::uint64_t overflows_to_halve);

  // Before run_started(). USAGE when the port cannot be had, see MetricsEndpoint.
  Status serve_metrics(const std::string& address, int port);
  std::string metrics_url() const { return endpoint_ ? endpoint_->url() : ""; }
  RunMetrics& metrics() { return metrics_; }

  // Where the ranks are. Any thread.
  void heard(std::vector<RankReport> reports) { monitor_.heard(std::move(reports)); }

  // Whether somebody asked for the run to stop through its folder. On record the first time.
  bool stop_requested();

  void run_started(std::uint64_t epoch, Topology topology);
  void run_finished(std::uint64_t epoch, std::uint64_t attempts, std::uint64_t updates);

  // Each clean attempt. Writes only when an alert or a streak ends, and every state_interval_attempts.
  void update_applied(std::uint64_t epoch, std::uint64_t attempt, std::uint64_t update);

  // From now on the samples of skipped attempts are put into the ledger. After run_started(), which says how
  // many ranks there are.
  void keep_ledger(SampleSource source);

  // Early warnings and changes, for the record only.
  void scale_changed(std::uint64_t epoch, std::uint64_t attempt, std::uint64_t update, double from,
                     double to);
  void spike(std::uint64_t epoch, std::uint64_t attempt, std::uint64_t update, std::string_view name,
             double value, double threshold);
  void headroom(std::uint64_t epoch, std::uint64_t attempt, std::uint64_t update, std::string_view tensor,
                double abs_max, double largest);

  // ---- For a run that writes checkpoints; in coordinator_checkpoints.cc.
  // Those on disk, oldest first, whenever they have changed. ROLL_BACK may be decided from the first call on.
  void set_generations(std::vector<GenerationId> generations);
  // What a generation has to keep of this memory.
  std::string lineage();
  // The newest generation that may be restored now; none: any.
  std::optional<GenerationId> restore_at_most() const;
  // There is no generation, and has never been one: what was trained without is void.
  bool may_begin_anew() const;
  void begun_anew();
  // All ranks have the state of `at.from`: budgets, windows, loss scale and ledger are as of then, history
  // and rollbacks as they are. Memory says where to go on; after a decision ROLL_BACK at the next epoch.
  // NO_CLEAN_GENERATION for a lineage that cannot be read, RANKS_DISAGREE when the folder was taken over.
  Status restored(const RestoredState& at);
  void restore_failed(const Status& why);  // the run ends by it
  void checkpoint_done(const CheckpointNews& news);

  // ---- Evidence; in coordinator_evidence.cc.
  // From now on what happened is kept in RUN_DIR/incidents, and decisions say what is wanted of whom. Without
  // a record nothing is.
  void keep_evidence(RunDescription description);
  // What the ranks contributed to the incident handled last, of which evidence was wanted. Written in the
  // background. `examination`: what the examiner found, when one was ordered; null when it sent nothing.
  void submit_evidence(std::vector<EvidencePart> parts, const EvidencePart* examination = nullptr);
  void report_evidence();
  void tell_no_evidence(const std::string& why);
  // Appends what the layers of an attempt of rank 0 made to RUN_DIR/layers.jsonl, as long as that has room.
  void keep_layers(const LayerAttempt& attempt);
  // The run ends: waits for what is being written, as long as the policy says.
  void finish_evidence();

  // The ranks could not agree, or not be told: this rank leaves by itself.
  void run_broken(std::uint64_t epoch, std::uint64_t attempt, std::uint64_t update, const Decision& decision);

  // Each attempt that is not clean: decides, counts it and puts it on record, before any rank is told.
  Decision handle(const Incident& incident);

 private:
  explicit Coordinator(const Policy& policy);
  Decision decide_and_count(const Incident& incident);
  void charge(std::uint64_t skips, std::uint64_t epoch, std::uint64_t attempt, std::uint64_t update);
  void charge_streak(std::uint64_t epoch, std::uint64_t attempt, std::uint64_t update);
  void settle_by_update(std::uint64_t epoch, std::uint64_t attempt, std::uint64_t update);
  void watch_calibration_rate(std::uint64_t epoch, std::uint64_t attempt, std::uint64_t update);
  bool record_rate_changes(std::uint64_t epoch, std::uint64_t attempt, std::uint64_t update);
  void end_epoch(Decision* decision, const Incident* incident);
  void update_metrics();
  void finish_metrics(StatusCode code);
  void run_ended(std::uint64_t epoch, std::uint64_t attempt, std::uint64_t update, const Decision& decision);
  // In coordinator_evidence.cc.
  std::optional<EvidenceOrder> order_evidence(const Incident& incident, const Decision& decision);
  void describe(const Incident& incident, const Decision& decision, BundleManifest* about) const;
  void order_examination(const Incident& incident, EvidenceOrder* order);
  void finish_examination(const std::vector<EvidencePart>& parts, const EvidencePart* examination);
  // In coordinator_checkpoints.cc.
  struct Rollback {
    GenerationId to;
    std::uint64_t attempt;  // that led to it
    bool closing;           // after the last one
  };
  Decision go_back_or_end(const Decision& wanted, const Incident& incident);
  void go_on_from_memory(const std::optional<Rollback>& rollback, nlohmann::ordered_json what);
  // In coordinator_memory.cc.
  void drop_samples(std::uint64_t epoch, std::uint64_t attempt, std::uint64_t update, int origin);
  Status take_up(const std::string& run_dir);
  void restore_parts();
  void save_parts();
  void write_memory(bool first = false);
  void report_unwritten(const Status& status);
  void record(const std::string& name, nlohmann::ordered_json fields);
  std::vector<std::string> origin_devices(const Incident& incident) const;

  const std::unique_ptr<const Policy> policy_;
  std::unique_ptr<RunState>
      memory_;  // what has no member of its own; the others' part is as of the last write
  SkipBudget budget_;
  RateRules rules_;
  Calibration calibration_;
  bool calibration_alert_ = false;  // raised and not cleared yet
  Suspects suspects_;
  Topology topology_;
  RunMetrics metrics_;
  std::unique_ptr<MetricsEndpoint> endpoint_;
  RunFolder folder_;
  EventLog events_;
  EventLog ledger_;
  std::optional<DroppedData> dropped_;
  bool checkpoints_on_ = false;
  std::vector<GenerationId> generations_;          // on disk, oldest first
  std::map<GenerationId, std::string> manifests_;  // SHA-256 of theirs, as far as known
  std::optional<Rollback> rollback_;               // decided, not carried out yet
  bool do_not_requeue_ = false;                    // the running incident ends the run for good
  RunDescription description_;
  std::unique_ptr<EvidenceStore> evidence_;
  std::unique_ptr<BundleManifest> about_;  // the incident of which evidence is awaited
  std::unique_ptr<LayerLog> layers_;       // once there is something to write
  bool examines_ = false;                  // its first origin's attempt is made again by another rank, too
  bool keeps_record_ = false;
  bool resumed_ = false;
  bool taken_over_ = false;
  bool write_failed_ = false;         // said on stderr
  std::uint64_t clean_attempts_ = 0;  // since the memory was written
  bool stop_told_ = false;            // that it was asked for is on record
  RunMonitor monitor_;                // last: its thread ends before the folder is given back
};

}  // namespace holdfast
