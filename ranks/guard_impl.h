// What is behind a StepGuard: of one rank, and on rank 0 with the coordinator.
//
//   guard_impl.cc         an attempt, from begin to finish
//   guard_start.cc        the start of a run
//   guard_evidence.cc     what is kept of an attempt that was not clean
//   guard_checkpoints.cc  checkpoints, going back to them, the proof that replicas agree and the sweep
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "attempt_log.h"
#include "buffer_snapshot.h"
#include "holdfast/checkpoint/checkpoint_store.h"
#include "holdfast/collectives/verdict.h"
#include "holdfast/collectives/watchdog.h"
#include "holdfast/coord/coordinator.h"
#include "holdfast/coord/policy.pb.h"
#include "holdfast/evidence.h"
#include "holdfast/loss_scaler.h"
#include "holdfast/replica_groups.h"
#include "holdfast/spike_detector.h"
#include "holdfast/step_guard.h"
#include "layer_history.h"
#include "state_sweep.h"

namespace holdfast {

class RankEvidence;
// Where rank 0 says that the run is.
class RunState;

class StepGuard::Impl {
 public:
  Impl(Collective& collective, const Policy& policy, const GuardOptions& options,
       std::unique_ptr<Coordinator> coordinator);

  // ---- the start
  void scale_loss();
  Status agree_on_groups();   // collective
  Status take_position();     // collective
  Status start_watchdog();    // collective
  Status gather_placement();  // collective

  // ---- an attempt
  void begin();
  void progress(Phase phase);
  Probe observe(Stage stage, std::string_view tensor, const TensorView& view, std::int64_t offset);
  void add(Stage stage, std::string_view tensor, const Probe& probe, std::int64_t offset, DType dtype);
  void observe_layer(Stage stage, EvidenceRecorder::Kind kind, std::string_view tensor,
                     const TensorView& view);
  bool watch(std::string_view name, double value);
  void watch_headroom(std::string_view tensor, DType dtype, double abs_max);
  Decision decide(DeviceAttempt* device);  // null: the record is the host's alone
  void finish();
  Decision close();

  // ---- checkpoints
  Status register_state(TrainingState state);
  Decision roll_back();

  // ---- evidence
  void provide_evidence(EvidenceProviders providers);

  Collective& collective_;
  const GuardOptions options_;
  const Policy policy_;
  const std::string policy_text_;
  const std::uint64_t policy_hash_;
  const std::uint64_t coefficient_;                 // of this rank in the agreement lane
  ReplicaGroups groups_;                            // constant from create() on
  std::vector<int> replicas_;                       // the ranks of this rank's group
  std::int64_t place_ = 0;                          // of this rank among them
  std::uint64_t group_coefficient_ = 0;             // of this rank in the proof
  const std::unique_ptr<Coordinator> coordinator_;  // on rank 0 only
  std::string topology_map_;                        // on rank 0 only

  std::uint64_t epoch_ = 0;
  std::uint64_t attempt_ = 0;
  std::uint64_t updates_ = 0;
  std::uint64_t skips_ = 0;
  bool applied_ = false;     // the running attempt was decided APPLY
  bool ended_ = false;       // what was decided ends the run
  bool closing_ = false;     // what is decided is the end of the run, not an attempt
  bool overflowed_ = false;  // the running attempt was skipped for a gradient overflow
  AttemptLog log_;
  BufferSnapshot snapshot_;

  // A floating-point buffer that forward mutates.
  struct ProtectedBuffer {
    std::string name;
    TensorView view;
  };
  std::vector<ProtectedBuffer> scanned_buffers_;
  std::optional<LossScaler> scaler_;
  std::map<std::string, SpikeDetector, std::less<>> detectors_;
  std::vector<std::pair<std::string, double>> watched_;  // in this attempt
  std::set<std::string, std::less<>> low_headroom_;      // tensors that were warned of

  TrainingState state_;                     // as registered, and the guard's own
  std::unique_ptr<CheckpointStore> store_;  // when checkpoints are written
  std::optional<std::uint64_t> saved_at_;   // the attempt that the last one was begun at
  EvidenceProviders providers_;
  LayerHistory layers_;
  bool flight_proven_ = false;            // replicas agreed on what is in flight
  std::vector<GenerationId> publishing_;  // completed, and of which no outcome is known yet; on rank 0
  std::string restored_from_;             // name of the generation; "" for none
  std::unique_ptr<StateSweep> sweep_;     // when state is registered
  bool proof_wanted_ = false;             // in the next attempt, whatever the schedule says
  bool proves_ = false;                   // the running attempt carries a proof
  bool asks_peers_ = false;               // the watchdogs talk to each other
  std::unique_ptr<Watchdog> watchdog_;    // last: its thread ends first

 private:
  std::uint64_t agreement_lane() const;
  Status sum(DeviceAttempt* device, Record* record);  // collective
  void learn_from(DeviceAttempt& device, const Verdict& verdict);
  Status take_loss_scale(const RunState& position);
  SpikeOptions spike_options() const;
  void update_scale();
  void keep_scaler();
  Decision apply();
  Decision decide_on_incident(const Verdict& verdict);
  Incident incident(const Verdict& verdict, const std::vector<Bytes>& reports) const;
  Decision broken(const Status& status);
  Decision end_attempt(Decision decision, const Verdict& verdict = {});

  EvidenceOrder for_this_rank(EvidenceOrder order) const;
  Status collect_evidence(const EvidenceOrder& order);  // collective
  std::unique_ptr<EvidenceRecorder> start_evidence(const EvidenceOrder& order);
  void complete_evidence(const EvidenceOrder& order, EvidenceRecorder* recorder);
  void submit_evidence(const EvidenceOrder& order, EvidencePart* batch, RankEvidence* own,
                       const std::vector<Bytes>& all);
  EvidenceSubject subject_of(const EvidenceOrder& order) const;
  Status hand_on_batch(const EvidenceOrder& order, EvidenceRecorder* own, EvidencePart* batch);  // collective
  Bytes packed_batch(const EvidenceOrder& order, EvidenceRecorder* own) const;
  void examine(const EvidenceOrder& order, const EvidencePart& batch, EvidencePart* to);
  void end_layers();
  void finish_evidence();
  void record_subject(const EvidenceOrder& order, EvidenceRecorder* recorder);
  void add_state(std::uint64_t most_bytes, EvidencePart* part) const;

  void begin_sweep_if_due();
  void begin_sweep(StateSweep::Scope scope);
  void end_sweep();
  std::string report(const Verdict& verdict) const;
  void count_proof(const Verdict& verdict);
  bool checkpoint_due() const;
  void save_checkpoint();
  void report_checkpoints();
  void judge_checkpoint(const Verdict& verdict);
  void tell_generations();
  // Collective, after each verdict, when a checkpoint is in flight.
  Status settle_checkpoint(const Decision& decision, const Verdict& verdict);
  Status complete_checkpoint();
  Status leave_checkpoint();  // collective: the state as it is, on disk before this returns
  Status replicas_agree_now(bool* agree);
  Status agree_on_settings();
  Status choose_beginning(bool* restores);
  Status still_held() const;
  Status restore();
  StateBytes own_state();
};

}  // namespace holdfast
