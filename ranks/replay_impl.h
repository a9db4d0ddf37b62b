// Experiments on one bundle.
#pragma once

#include <string>
#include <vector>

#include "experiment_log.h"
#include "holdfast/replay.h"
#include "replay_attempt.h"

namespace holdfast {

struct Experiment {
  std::vector<std::string> texts;     // settings as they were given
  std::vector<std::string> settings;  // those of the trainer
  std::vector<RecordedSample> blanked;
  std::vector<RecordedSample> kept;  // of a search: the others are blanked
  bool is_subset = false;            // it is one of a search

  bool is_plain() const { return texts.empty() && !is_subset; }
};

std::string name_of(const RecordedSample& sample);  // "0.17", "17" of no micro-batch

std::vector<std::string> ranges_of(const std::vector<RecordedSample>& samples);

class Replay::Impl {
 public:
  Impl(FileSystem& files, std::string bundle, ReplayTrainer trainer, std::string run_dir)
      : bundle_(std::move(bundle)),
        run_dir_(std::move(run_dir)),
        trainer_(std::move(trainer)),
        recorded_(files, bundle_, run_dir_),
        attempts_(recorded_, trainer_),
        log_(files, bundle_ + "/experiments.jsonl") {}

  ReplayReport run(const std::vector<std::string>& settings);
  ReplayReport shrink(const std::vector<std::string>& settings, std::uint64_t most_replays);
  ReplayReport one_factor(const std::vector<std::string>& settings, std::uint64_t most_replays);

  ReplayReport refuse(const std::string& missing) const;

 private:
  // "", or why nothing can be replayed.
  std::string open();
  std::string find_batch();
  std::string split(const std::vector<std::string>& settings, Experiment* out) const;
  ReplayReport make(const Experiment& experiment);
  void judge(const Experiment& experiment, const ReplayOutcome& outcome, ReplayReport* report) const;
  void write_text(const Experiment& experiment, const ReplayOutcome& outcome, ReplayReport* report) const;
  std::string describe_bits(const ReplayReport& report, const ReplayOutcome& outcome) const;
  std::string environment_difference() const;
  void keep(const std::string& name, const nlohmann::ordered_json& fields);
  void keep_experiment(const Experiment& experiment, const ReplayOutcome& outcome,
                       const ReplayReport& report);

  // ---- searches, see replay_search.cc
  std::string find_samples(const Experiment& base, std::vector<RecordedSample>* samples) const;
  // `shrunk`: what came of it, or why nothing did.
  ReplayReport search(const Experiment& base, std::uint64_t most_replays, std::string* shrunk);
  std::string id_of(const RecordedSample& sample) const;
  std::string describe_set(const ReplayReport& report, std::size_t of, std::uint64_t replays) const;

  const std::string bundle_;
  const std::string run_dir_;
  const ReplayTrainer trainer_;
  ReplayBundle recorded_;
  AttemptReplay attempts_;
  ExperimentLog log_;
  std::string log_failure_;
  bool opened_ = false;
  bool batch_is_loaded_ = false;
  std::string missing_;
};

}  // namespace holdfast
