// An attempt that went wrong, made again from its bundle: in one process, without MPI and without the run.
// For a trainer that gave StepGuard::provide_evidence() what its attempts are made of.
//
//   ReplayTrainer trainer;
//   trainer.state = [&] { return state_of(model); };     // as for register_state()
//   trainer.run_attempt = [&](const RecordedAttempt& attempt, ReplayWatcher& watcher) { ... };
//   Replay replay(real_file_system(), "runs/first/incidents/e0001-a0000000200", trainer);
//   const ReplayReport report = replay.run();
//   std::fputs(report.text.c_str(), stdout);
//   return report.exit_code();
//
// Bundles are hostile until checked: all that the callbacks are given was verified against its digests, and
// names in `text` are printable. What the values mean is for the trainer to check.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "holdfast/coord/storage/file_system.h"
#include "holdfast/evidence.h"
#include "holdfast/training_state.h"

namespace holdfast {

struct RecordedTensor {
  std::string name;
  DType dtype = DType::kFloat32;  // as stored: of complex128 kFloat64, with a last extent of 2
  std::vector<std::int64_t> shape;
  Bytes bytes;  // as large as dtype and shape say
  int micro_batch = -1;
};

// One sample of the batch: row `index` of each tensor of a micro-batch; -1: of those that are of all.
struct RecordedSample {
  int micro_batch = -1;
  std::int64_t index = 0;
  auto operator<=>(const RecordedSample&) const = default;
};

// The attempt of one rank, the first origin that is on record.
struct RecordedAttempt {
  int rank = 0;
  std::uint64_t ranks = 1;
  std::uint64_t replicas = 1;  // of its replica group: those that a sum is of
  double loss_scale = 1;
  EvidenceSubject subject;  // what the providers were told
  std::map<std::string, std::string> configuration;
  // EvidenceRecorder::fact() of each rank of its replica group that was asked, by rank.
  std::map<int, std::map<std::string, std::string>> facts;
  std::vector<RecordedTensor> batch;  // EvidenceRecorder::batch(), but for samples that an experiment blanks
  std::vector<RecordedTensor> seen;   // EvidenceRecorder::seen()
  std::vector<std::string> left_out;  // names of what the quota left no room for: the batch may lack a part
  std::vector<std::string> settings;  // KEY=VALUE that an experiment changes, without those of samples

  const std::string* fact(std::string_view name) const;  // of `rank`; null when there is none
  const RecordedTensor* find_seen(std::string_view name) const;
};

// The first thing that was not as it should be.
struct Boundary {
  Stage stage = Stage::kInput;
  std::string tensor;
  std::int64_t index = -1;  // flat, row-major
  BadCounts counts;
  std::string error;  // of an exception, instead of the rest but the stage

  bool operator==(const Boundary&) const = default;
  std::string describe() const;  // printable
};

// Sees an attempt that is made again. Calls are those that the attempt made of the guard, and its providers
// of EvidenceRecorder.
class ReplayWatcher {
 public:
  ReplayWatcher(const ReplayWatcher&) = delete;
  ReplayWatcher& operator=(const ReplayWatcher&) = delete;

  // Runs `body` unless this attempt has failed already, and keeps what it throws; whether all is well.
  bool run(Stage stage, const std::function<void()>& body);
  // As StepGuard::observe(), with the same names; `offset` as there.
  void observe(Stage stage, std::string_view tensor, const TensorView& view, int micro_batch = -1,
               std::int64_t offset = 0);
  void observe_loss(double loss, int micro_batch = -1);
  // As EvidenceRecorder::layer(), in the order of the computation: brackets the boundary, and no more.
  void layer(Stage stage, EvidenceRecorder::Kind kind, std::string_view tensor, const TensorView& values,
             int micro_batch, bool scaled);
  // The bundle holds too little, or nothing that fits, to go on: it cannot be replayed, for want of `what`.
  void lacks(std::string_view what);
  // A line of the report: "injected", "faults are put in again".
  void note(std::string_view what, std::string_view text);

 private:
  friend class AttemptReplay;
  ReplayWatcher();
  void fail(std::string_view what);
  void see(Stage stage, std::string_view tensor, const Probe& probe, std::int64_t offset);
  std::optional<Boundary> earliest() const;

  Stage stage_ = Stage::kInput;                             // that runs, or ran last
  std::array<std::optional<Boundary>, kStageCount> first_;  // by stage
  std::array<std::size_t, kStageCount> tensors_{};          // that were not finite
  std::optional<Boundary> error_;
  EvidenceRecorder recorder_;
  std::string missing_;
  std::vector<std::pair<std::string, std::string>> notes_;
};

// Called on the thread that calls Replay, one at a time. Each may throw: load_state and prepare then refuse,
// an attempt has failed.
struct ReplayTrainer {
  // Makes what `attempt` asks for: model, precision, data. Before the first run, and again before one with
  // other settings. A configuration or setting that it cannot take is refused. May be empty: then settings
  // are.
  std::function<Status(const RecordedAttempt& attempt)> prepare;

  // For a bundle that holds no batch (a compact one): adds to `attempt`.batch what the attempt was fed with,
  // from the data set and the facts on record. Once. May be empty: such bundles are not replayed then.
  std::function<Status(RecordedAttempt* attempt)> load_batch;

  // One of the two, see also `weights_digest`. The memory that attempts are made with, after prepare(): every
  // tensor and bytes of it is filled as recorded before each run, so what is no part of an attempt, such as a
  // moving average, may be left out.
  std::function<TrainingState()> state;
  // Or: takes one recorded tensor, or the bytes that a StateBytes saved, by its name; refuses what is not of
  // this model and passes over what it has no use for. Called for each before each run; not for what each
  // rank has of its own when only another rank's is known, as a bundle has rank 0's.
  std::function<Status(const RecordedTensor& tensor)> load_state;
  std::vector<std::string> needed_state;  // with load_state: names without which nothing can be replayed

  // Makes the attempt again, up to the rank's own gradients: no update. Required.
  std::function<void(const RecordedAttempt& attempt, ReplayWatcher& watcher)> run_attempt;
  // For what was found in the sum, and by the optimizer: called after an attempt that was clean, to observe()
  // the sum at the subject's index, and the update without writing it. Such bundles cannot be replayed
  // without.
  std::function<void(const RecordedAttempt& attempt, ReplayWatcher& watcher)> reduce_again;
  std::function<void(const RecordedAttempt& attempt, ReplayWatcher& watcher)> update_again;

  // Of all that an update changes: equal digests mean equal bits. May be empty with `state`, of which all
  // that forward does not mutate is then compared.
  std::function<std::string()> weights_digest;

  // Makes sample `row` of a tensor one that weighs nothing; without it, all its bytes become 0.
  std::function<void(RecordedTensor& tensor, std::int64_t row)> blank;
  // Settings to try one at a time, see Replay::one_factor().
  std::function<std::vector<std::string>(const RecordedAttempt& attempt)> factors;
  // EvidenceProviders::environment: compared too.
  std::vector<std::string> environment;
};

enum class ReplayResult : int {
  kReproduced = 0,     // the same stage, tensor, index and classes
  kDifferent = 1,      // something else was not finite, or failed
  kNotReproduced = 2,  // everything was finite
  kNotReplayable = 3   // the bundle lacks what it takes, is damaged or is of another trainer
};
const char* replay_result_name(ReplayResult result);  // "REPRODUCED", ...

// Of counts and of all measurements that both the bundle and the replay have.
enum class Bits { kNotCompared, kSame, kDiffer };

struct ReplayReport {
  ReplayResult result = ReplayResult::kNotReplayable;
  std::string text;     // what to print, lines
  std::string missing;  // of kNotReplayable
  std::optional<Boundary> recorded;
  std::optional<Boundary> found;
  std::string last_clean, first_dirty;  // layers around the boundary; "" for none
  // Whether the fingerprint of the environment is the recorded one. It is kDifferent then, too, when the bits
  // of an attempt without settings are not.
  bool same_environment = false;
  Bits bits = Bits::kNotCompared;
  std::uint64_t measurements = 0;       // that were compared
  std::vector<RecordedSample> samples;  // of shrink(): the subset
  bool is_minimal = false;              // of shrink(): without any one of them it does not happen
  std::vector<std::pair<std::string, ReplayResult>> factors;  // of one_factor()

  int exit_code() const { return static_cast<int>(result); }
};

// For one thread. Never changes anything of the bundle but experiments.jsonl in it: one line for each
// experiment with what it was made of and what came of it, unless that is there already. `files` must outlive
// it.
class Replay {
 public:
  // `run_dir`, where checkpoints/ is: a bundle without weights is replayed from the checkpoint that it names,
  // when that is the state right before the attempt and is whole. "": where the bundle was written.
  Replay(FileSystem& files, std::string bundle, ReplayTrainer trainer, std::string run_dir = "");
  ~Replay();

  // Makes the attempt again with `settings`: the trainer's own, and "sample.MICRO.INDEX=0", which blanks a
  // sample; "sample.INDEX=0" of a batch that was recorded without micro-batches. Never fails but in its
  // report.
  ReplayReport run(const std::vector<std::string>& settings = {});

  // Looks for the fewest samples that still give the same boundary: stage, tensor and index, and no class
  // that was not there. Others are blanked and stay in their place, so that shapes, random numbers and what
  // the loss is divided by stay the same; statistics over the batch (BatchNorm) do not. What is found has no
  // sample that could be taken away, though there may be other such sets. REPRODUCED when there is such a
  // set. Makes at most `most_replays` + 2 attempts: that with `settings` alone first, and the smallest set
  // once more in the end.
  ReplayReport shrink(const std::vector<std::string>& settings = {}, std::uint64_t most_replays = 1000);

  // Each of the trainer's factors alone, and each sample of the smallest set alone (the first 32) taken away.
  // The result is that of the attempt without any. Makes as many attempts as shrink(), and one more for each
  // factor and each of those samples.
  ReplayReport one_factor(const std::vector<std::string>& settings = {}, std::uint64_t most_replays = 1000);

 private:
  class Impl;
  const std::unique_ptr<Impl> impl_;
};

// A fact of this name, of each micro-batch, is shown beside its samples: ids, separated by commas.
std::string samples_fact(int micro_batch);  // "samples.0"; "samples" for -1

}  // namespace holdfast
