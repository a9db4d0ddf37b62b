// The guard of one training step: what a rank calls.
//
//   guard->begin();                                               each rank, each attempt
//   guard->run(Stage::kForward, [&] { ... });                     your code; an exception becomes a flag
//   guard->observe(Stage::kBackward, "conv1.weight", view);       finite scan
//   if (!guard->healthy()) zero(gradients);                       take part in the all-reduce all the same
//   guard->reducing();                                            tells who hangs before it from who waits
//   ... your own gradient all-reduce ...
//   guard->observe_share(bucket, layout);                         this rank's 1/N of the sum
//   const Decision decision = guard->decide();                    one collective
//   if (decision.apply()) guard->update([&] { ... });             nothing else on SKIP
//   if (decision.ends_run()) return decision.exit_code();         the same on every rank
//   if (decision.rolls_back()) guard->roll_back();                all are at guard->attempt() again
//   else guard->finish();
//
// What a SKIP leaves: parameters, optimizer state, schedule and update counter as they were, because the
// update was not run; buffers given to protect() as they were before begin(). The attempt is counted and the
// batch is dropped.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "holdfast/checkpoint/checkpoint_store.h"
#include "holdfast/collectives/collective.h"
#include "holdfast/coord/decision.h"
#include "holdfast/coord/sample_source.h"
#include "holdfast/device_attempt.h"
#include "holdfast/evidence.h"
#include "holdfast/loss_scaler.h"
#include "holdfast/scan.h"
#include "holdfast/sparse_scan.h"
#include "holdfast/tensor_view.h"
#include "holdfast/training_state.h"

namespace holdfast {

struct GuardOptions {
  std::string policy;                  // textproto or JSON; the same on every rank; empty for the defaults
  std::string run_dir;                 // where rank 0 keeps the record of the run; empty for none
  bool resume = false;                 // go on with the run that run_dir holds; begin one where there is none
  int expected_ranks = 0;              // when not 0, any other number of ranks is refused (exit code 83)
  std::map<std::string, int> axes;     // tags of this rank, e.g. {"dp": 0, "tp": 1}; see replica_group
  bool loss_scaling = false;           // the trainer scales its loss, see loss_scale()
  std::function<bool()> asked_to_end;  // see Watchdog::Options; called on another thread
  std::function<void()> before_leaving;       // for communicators of your own; likewise
  std::optional<int> metrics_port;            // rank 0 serves /metrics there over HTTP; 0: a free one
  std::string metrics_address = "127.0.0.1";  // numeric; on which interface
  CheckpointOptions checkpoints;  // in RUN_DIR/checkpoints, which all hosts must see; see register_state()
  bool watchdog = true;           // end this process when an attempt makes no progress, see Policy

  // Which ranks hold the same parameters, and are compared with each other: those with this number. On no
  // rank: those whose `axes` differ in "dp" alone, so all of them without tags. On every rank or on none, and
  // every rank names the same axes: RANKS_DISAGREE otherwise. See ReplicaGroups.
  std::optional<int> replica_group;
};

// A tensor inside a flat bucket, in elements. What no slice covers is padding and is not looked at.
struct BucketSlice {
  std::string_view tensor;
  std::int64_t offset = 0;
  std::int64_t count = 0;
};

// Elements [begin, begin + count) of one tensor of a bucket.
struct SharePiece {
  std::string_view tensor;
  std::int64_t bucket_offset = 0;  // of the piece, in the bucket
  std::int64_t begin = 0;
  std::int64_t count = 0;
};

// One for each rank, used by one thread, the one that may call MPI. begin, run, observe, update and finish
// are local; create, decide and close are collective.
class StepGuard {
 public:
  // Collective. `collective` covers every rank that must agree (with tensor or pipeline parallelism: all of
  // them) and must outlive the guard. Fails on every rank alike, with the reason of the lowest rank that has
  // one: USAGE for a bad policy or run folder, or for a metrics port that cannot be had,
  // RESTART_NOT_ACKNOWLEDGED for a run that was aborted. With `resume` epoch(), attempt(), updates(), skips()
  // and the loss scale are those of the run, the same on every rank: load your checkpoint, or begin anew with
  // the weights, and go on at attempt(). Starts the watchdog, which counts from here on: begin() soon.
  static Status create(Collective& collective, const GuardOptions& options, std::unique_ptr<StepGuard>* out);
  ~StepGuard();
  StepGuard(const StepGuard&) = delete;
  StepGuard& operator=(const StepGuard&) = delete;

  // Collective, once before the first attempt: ranks of the same replica group (see GuardOptions) hold the
  // same tensors, so their layouts must be equal in names, offsets and sizes. RANKS_DISAGREE on every rank
  // otherwise, naming the group and its minority.
  Status agree_on_layout(std::span<const BucketSlice> layout);

  // A buffer that forward mutates (BatchNorm statistics): copied at each begin() and put back unless the
  // attempt is applied. decide() scans it, as part of stage forward: an overflow that ends in the statistics
  // alone leaves the outputs finite, and every later one wrong. The memory must stay where it is for the
  // guard's life.
  void protect(std::string_view name, void* data, DType dtype, std::int64_t element_count);
  // One that is not floating point, such as a counter.
  void protect(void* data, std::size_t bytes);

  // Collective, once, before the first attempt: what makes the run resumable. From then on replicas are
  // proven to agree, and everything is swept for what is not finite, by the policy's intervals. With
  // GuardOptions.checkpoints, a checkpoint is begun in finish() every so many attempts, in close(), and when
  // the operator stops the run; the first at once, so that there is always one to go back to. With `resume`,
  // the newest checkpoint that every rank finds clean is loaded: epoch(), attempt(), updates(), skips() and
  // the loss scale are as of then. A run that never had one begins anew, at attempt 0. Fails on every rank
  // alike: USAGE for a state that TrainingState::check() refuses, a checkpoint of another model, or a second
  // call, RANKS_DISAGREE when ranks differ in policy or interval, NO_CLEAN_GENERATION when no checkpoint is
  // clean. The memory must stay until the guard is gone, and change only in update() and by forward, see
  // StateTensor.
  Status register_state(TrainingState state);
  // Name of the checkpoint that was loaded last; "" for none.
  const std::string& restored_from() const;

  // Local, once, before the first attempt, on every rank: what is kept in RUN_DIR/incidents when an attempt
  // goes wrong. Without it, nothing is. The registered state is kept, too: see register_state().
  void provide_evidence(EvidenceProviders providers);

  // Collective, after decide() or close() gave ROLL_BACK, in place of finish(): the registered state is that
  // of an earlier checkpoint again, bit for bit, and so are loss scale and budgets. Go on at attempt(), in
  // the next epoch. Gives ROLL_BACK when done, and ABORT when no checkpoint is clean (NO_CLEAN_GENERATION).
  Decision roll_back();

  // Starts the next attempt.
  void begin();

  // Tells later observations which micro-batch of the accumulation window they belong to, kWholeWindow for
  // what is made of all of them. A non-finite value in any of them makes the whole attempt bad.
  static constexpr int kWholeWindow = -1;
  void micro_batch(int index);

  // Runs `body` unless this attempt has failed here already, and keeps an exception as this rank's error, at
  // `stage`. Returns whether the attempt is healthy so far. An error never leaves the sequence of
  // collectives: go on to your all-reduce with zeros, and to decide().
  template <typename Body>
  bool run(Stage stage, Body&& body) {
    if (!healthy()) return false;
    try {
      body();
    } catch (const std::exception& error) {
      report_error(stage, error.what());
    } catch (...) {
      report_error(stage, "exception of unknown type");
    }
    return healthy();
  }
  void report_error(Stage stage, std::string_view what);

  // No error in this attempt on this rank. Says nothing of non-finite values.
  bool healthy() const;

  // Right before a collective of your own, on every rank, healthy or not: the watchdogs then tell a rank that
  // hangs before it from those that wait in it, after one deadline. Without it they are at the same place,
  // and leave after ten. A few relaxed stores.
  void reducing();

  // Scans a tensor and keeps what is not finite for the verdict. Returns the measurement. `view` may be a
  // piece of the tensor that begins at element `offset`. A dtype that is not known is this rank's error, and
  // so is a tensor without memory or of a negative size.
  Probe observe(Stage stage, std::string_view tensor, const TensorView& view, std::int64_t offset = 0);

  // The same for a sparse gradient, see scan_sparse(); what that refuses is this rank's error.
  Probe observe(Stage stage, std::string_view tensor, const SparseView& gradient);

  // The same with a measurement that was made before, by scan() or by one of fused_scan.h, of values of
  // `dtype`.
  void observe_measured(Stage stage, std::string_view tensor, const Probe& probe, std::int64_t offset = 0,
                        DType dtype = DType::kFloat32);

  // observe() for each tensor of a flat bucket.
  void observe_bucket(Stage stage, const TensorView& bucket, std::span<const BucketSlice> layout);

  // At stage reduction, for the reduced bucket, which is the same on every rank of a replica group: scans
  // this rank's 1/N share of its elements, so that an overflow born in the sum is found once.
  void observe_share(const TensorView& bucket, std::span<const BucketSlice> layout);

  // observe_share() for a trainer that has scanned all of the reduced bucket anyway, for its norm: one probe
  // for each tensor of the layout. Costs nothing while all is finite. What is not finite on one rank alone,
  // since its memory went bad after the sum, is seen too: the attempt is skipped.
  void observe_reduced(const TensorView& bucket, std::span<const BucketSlice> layout,
                       std::span<const Probe> probes);

  // This rank's share of a layout: pieces of its tensors that, over all ranks of its replica group, cover
  // each element once.
  std::vector<SharePiece> share(std::span<const BucketSlice> layout) const;

  // Optimizer stage, by the policy's check_update. With BEFORE, observe() the prospective values at stage
  // optimizer ahead of decide(); each rank may do its share(). With AFTER, call this inside update() for what
  // was written, on every rank: a finding is told in the next decide(), or in close().
  bool checks_update_before() const;
  void observe_written(std::string_view tensor, const TensorView& view);

  // Whether the layers of this attempt are to be measured: after an incident, in as many attempts as the
  // policy's evidence.layer_statistics_attempts. From begin() to finish(). Where it is false, put no hooks
  // on.
  bool wants_layers() const;
  // What a layer made or got, in the order of the computation; of micro-batches, one after the other. Kept
  // for the next incident's record and, of rank 0, in RUN_DIR/layers.jsonl. Decides nothing: a value that is
  // not finite is for observe(). Without wants_layers() the tensor is not read.
  void observe_layer(Stage stage, EvidenceRecorder::Kind kind, std::string_view tensor,
                     const TensorView& view);

  // The loss of one micro-batch on this rank, observed at stage loss. The mean over the attempt's
  // micro-batches is logged as it is, NaN and all.
  void observe_loss(double loss);

  // Keeps a number with this rank's report of this attempt, should it turn out bad.
  void annotate(std::string_view name, std::int64_t value);

  // Where to learn which samples an attempt used: those of skipped attempts are put into
  // RUN_DIR/dropped.jsonl, and a warning into the record when classes or data shards are dropped out of
  // proportion. Local; only rank 0's is used, see SampleSource. Once, before the first attempt.
  void keep_ledger(SampleSource source);

  // Early warning. `value` must be the same on every rank, such as the norm of the reduced gradient: says
  // whether it is far above what it has been, see Policy.Spike. With action SKIP the attempt is then not
  // applied.
  bool watch(std::string_view name, double value);

  // Early warning when a magnitude comes near the largest finite value of its type. Rank 0's call leaves the
  // event, so pass what is the same on every rank, such as the reduced gradient's; of activations, which each
  // rank has its own, rank 0's stand for all. Divide the gradient of a scaled loss by loss_scale(): the scale
  // is meant to grow until it overflows. Activations are not scaled, and no loss scale cures their overflow.
  void watch_headroom(std::string_view tensor, DType dtype, double abs_max);

  // 1 unless GuardOptions::loss_scaling. Multiply the loss by it before backward, and the reduced gradient by
  // its inverse before clipping and update. Changes in finish() only, on all ranks alike.
  double loss_scale() const;
  LossScaler::State loss_scale_state() const;  // to be saved with a checkpoint
  // Local, between attempts, with the same state on every rank. USAGE for a state that the policy rules out,
  // see LossScaler::restore(). Without loss scaling there is nothing to restore, and any state is fine.
  Status restore_loss_scale(const LossScaler::State& state);

  // Asks every rank to stop at the end of this attempt, without an update (exit code 86); of the next one
  // that is not skipped for something worse.
  void request_stop();

  // This rank has no batch for the attempt after this one: every rank gets `last_attempt_with_data`. Must be
  // said one attempt before the data runs out; holds from then on, until a roll_back().
  void no_next_batch();

  // Collective: one all-reduce when the attempt is clean. Otherwise the bad ranks tell rank 0 what they saw,
  // rank 0 puts it on record and decides, and every rank is told. Restores the protected buffers unless the
  // decision is APPLY.
  Decision decide();

  // The same over a record that a device fills, see CudaAttempt: `device` sums it, once, and obeys the
  // verdict by itself. In each attempt one decide() or the other, the same on every rank; close() needs none.
  // What the host observed counts, too. A failed sum, an exception in it, and a `device` of other ranks than
  // the guard's are never APPLY. An update that could not be enqueued is one that failed, see update(); what
  // cannot be read back of a bad attempt is this rank's error, in its report.
  Decision decide(DeviceAttempt& device);

  // Runs the optimizer update after APPLY. An exception is kept: the next decide(), or close(), tells every
  // rank that replicas may differ (exit code 83).
  template <typename Body>
  void update(Body&& body) {
    begin_update();
    try {
      body();
    } catch (const std::exception& error) {
      report_failed_update(error.what());
    } catch (...) {
      report_failed_update("exception of unknown type");
    }
    end_update();
  }

  // Ends the attempt: counts it, and its update if one was decided; begins a checkpoint when one is due,
  // which takes as long as a copy of the state.
  void finish();

  // Collective, once, after the last attempt: makes sure that no rank failed in its last update and writes
  // the end of the run. Decides ABORT otherwise, or ROLL_BACK, after which there are attempts to make again,
  // and APPLY when all is well. Not after a decision that ends the run.
  Decision close();

  // Between the two the watchdog waits: a long evaluation, a checkpoint. Calls nest.
  void pause_watchdog();
  void resume_watchdog();

  std::uint64_t epoch() const;
  std::uint64_t attempt() const;            // number of the running attempt, or of the next one outside
  std::uint64_t updates() const;            // applied so far
  std::uint64_t skips() const;              // of this run so far, the same on every rank
  const std::string& policy_text() const;   // the effective policy, every field shown
  const std::string& topology_map() const;  // hosts and their ranks, for people; on rank 0 only
  std::string metrics_url() const;          // where metrics are served; on rank 0 only, "" when they are not

 private:
  class Impl;
  explicit StepGuard(std::unique_ptr<Impl> impl);
  void begin_update();
  void end_update();
  void report_failed_update(std::string_view what);

  const std::unique_ptr<Impl> impl_;
};

}  // namespace holdfast
