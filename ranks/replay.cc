#include "holdfast/replay.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <exception>

#include "holdfast/coord/printable.h"
#include "holdfast/coord/storage/sha256.h"
#include "replay_impl.h"
#include "run_environment.h"

namespace holdfast {
namespace {

// All of `text` as a number that is not negative.
template <typename Number>
bool parse_count(std::string_view text, Number* out) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *out);
  return error == std::errc() && end == text.data() + text.size() && *out >= 0;
}

// "sample.0.17=0"; "sample.17=0" of a batch that is not divided into micro-batches.
bool parse_sample(std::string_view text, RecordedSample* out) {
  constexpr std::string_view kPrefix = "sample.";
  constexpr std::string_view kBlank = "=0";
  if (!text.starts_with(kPrefix) || !text.ends_with(kBlank)) return false;
  text = text.substr(kPrefix.size(), text.size() - kPrefix.size() - kBlank.size());
  const auto dot = text.find('.');
  out->micro_batch = -1;
  if (dot != std::string_view::npos && !parse_count(text.substr(0, dot), &out->micro_batch)) return false;
  return parse_count(text.substr(dot == std::string_view::npos ? 0 : dot + 1), &out->index);
}

bool is_compared(std::string_view name) {
  return name.starts_with("fingerprint.") || name.starts_with("variable.");
}

// What differs, printable; "" for nothing.
std::string environment_difference(const std::map<std::string, std::string>& recorded,
                                   const std::map<std::string, std::string>& here) {
  if (recorded.empty()) return "what it was is not on record";
  const auto of = [](const std::map<std::string, std::string>& all, const std::string& name) {
    const auto at = all.find(name);
    return at == all.end() ? std::string("not set") : printable(at->second);
  };
  for (const auto* names : {&recorded, &here}) {
    for (const auto& [name, value] : *names) {
      if (!is_compared(name) || of(recorded, name) == of(here, name)) continue;
      return fmt::format("{} was {}, here it is {}", printable(name), of(recorded, name), of(here, name));
    }
  }
  return "";
}

}  // namespace

std::string name_of(const RecordedSample& sample) {
  if (sample.micro_batch < 0) return std::to_string(sample.index);
  return fmt::format("{}.{}", sample.micro_batch, sample.index);
}

// "0.3", "0.5-17": subsets of a search are mostly runs.
std::vector<std::string> ranges_of(const std::vector<RecordedSample>& samples) {
  std::vector<std::string> all;
  for (std::size_t i = 0; i < samples.size();) {
    std::size_t end = i + 1;
    while (end < samples.size() && samples[end].micro_batch == samples[i].micro_batch &&
           samples[end].index == samples[end - 1].index + 1)
      ++end;
    all.push_back(name_of(samples[i]));
    if (end - i > 1) all.back() += fmt::format("-{}", samples[end - 1].index);
    i = end;
  }
  return all;
}

const char* replay_result_name(ReplayResult result) {
  switch (result) {
    case ReplayResult::kReproduced: return "REPRODUCED";
    case ReplayResult::kDifferent: return "DIFFERENT";
    case ReplayResult::kNotReproduced: return "NOT_REPRODUCED";
    case ReplayResult::kNotReplayable: return "NOT_REPLAYABLE";
  }
  return "UNKNOWN";
}

std::string samples_fact(int micro_batch) {
  return micro_batch < 0 ? "samples" : "samples." + std::to_string(micro_batch);
}

const std::string* RecordedAttempt::fact(std::string_view name) const {
  const auto of_rank = facts.find(rank);
  if (of_rank == facts.end()) return nullptr;
  const auto found = of_rank->second.find(std::string(name));
  return found == of_rank->second.end() ? nullptr : &found->second;
}

const RecordedTensor* RecordedAttempt::find_seen(std::string_view name) const {
  const auto found = std::ranges::find(seen, name, &RecordedTensor::name);
  return found == seen.end() ? nullptr : &*found;
}

// ---- one replay

std::string Replay::Impl::open() {
  if (opened_) return missing_;
  std::string missing;
  if (!trainer_.run_attempt || (!trainer_.state && !trainer_.load_state) ||
      (!trainer_.state && !trainer_.weights_digest)) {
    missing =
        "a trainer that can make an attempt (run_attempt), load its state and prove its weights untouched";
  } else {
    missing = recorded_.open();
  }
  if (missing.empty()) missing = find_batch();
  // Last: after an exception the next call begins anew.
  missing_ = std::move(missing);
  opened_ = true;
  return missing_;
}

std::string Replay::Impl::find_batch() {
  std::string missing = recorded_.missing_batch();
  if (missing.empty() || !trainer_.load_batch) return missing;
  try {
    if (Status s = trainer_.load_batch(recorded_.mutable_attempt()); !s.ok())
      return missing + "; " + printable(s.message());
  } catch (const std::exception& error) {
    return missing + "; " + printable(error.what());
  } catch (...) {
    return missing + "; exception of unknown type";
  }
  batch_is_loaded_ = true;
  return recorded_.missing_batch();
}

std::string Replay::Impl::split(const std::vector<std::string>& settings, Experiment* out) const {
  for (const std::string& text : settings) {
    RecordedSample sample;
    if (!parse_sample(text, &sample)) {
      out->settings.push_back(text);
      continue;
    }
    const auto holds = [&](const RecordedTensor& tensor) {
      return tensor.micro_batch == sample.micro_batch && !tensor.shape.empty() &&
             sample.index < tensor.shape[0];
    };
    if (std::ranges::none_of(recorded_.attempt().batch, holds))
      return printable(text) + ": the batch has no such sample";
    out->blanked.push_back(sample);
  }
  return "";
}

ReplayReport Replay::Impl::refuse(const std::string& missing) const {
  ReplayReport report;
  report.missing = missing;
  report.text =
      fmt::format("replay {}: NOT_REPLAYABLE\nmissing   {}\n", printable(recorded_.path()), missing);
  return report;
}

ReplayReport Replay::Impl::make(const Experiment& experiment) {
  const ReplayOutcome outcome = attempts_.run(experiment.settings, experiment.blanked);
  if (!outcome.missing.empty()) return refuse(outcome.missing);
  ReplayReport report;
  judge(experiment, outcome, &report);
  report.recorded = recorded_.boundary();
  report.found = outcome.found;
  report.last_clean = outcome.last_clean;
  report.first_dirty = outcome.first_dirty;
  if (!outcome.weights_untouched) {
    report.result = ReplayResult::kNotReplayable;
    report.missing = "an attempt that leaves the weights as they are: this one has changed them";
  } else {
    keep_experiment(experiment, outcome, report);
  }
  write_text(experiment, outcome, &report);
  return report;
}

// Of an experiment with settings nobody expects the bits of the attempt.
void Replay::Impl::judge(const Experiment& experiment, const ReplayOutcome& outcome,
                         ReplayReport* report) const {
  const Boundary& recorded = recorded_.boundary();
  report->result = ReplayResult::kNotReproduced;
  report->same_environment = environment_difference().empty();
  if (!outcome.found) return;
  const Boundary& found = *outcome.found;
  // Fewer samples may leave some classes out.
  const bool same = experiment.is_subset
                        ? same_place(found, recorded) && within_classes(found.counts, recorded.counts)
                        : same_boundary(found, recorded);
  report->result = same ? ReplayResult::kReproduced : ReplayResult::kDifferent;
  if (!experiment.is_plain() || report->result != ReplayResult::kReproduced) return;
  report->measurements = outcome.bits.compared;
  const bool same_counts = is_made_in_part(recorded.stage) || found.counts == recorded.counts;
  if (!same_counts || !outcome.bits.first_difference.empty()) {
    report->bits = Bits::kDiffer;
    if (report->same_environment) report->result = ReplayResult::kDifferent;
  } else if (outcome.bits.compared > 0) {
    report->bits = Bits::kSame;
  }
}

// Made only of what judge() found to be the same place.
std::string Replay::Impl::describe_bits(const ReplayReport& report, const ReplayOutcome& outcome) const {
  std::string text = "not recorded";
  if (report.bits == Bits::kSame) text = fmt::format("the same in all {} measurements", report.measurements);
  if (report.bits == Bits::kDiffer) {
    const std::string& first = outcome.bits.first_difference;
    text = "differ, first in " + (first.empty() ? "the counts" : first);
  }
  const std::string other = environment_difference();
  return text + (other.empty() ? "; the environment is the recorded one" : "; another environment: " + other);
}

void Replay::Impl::write_text(const Experiment& experiment, const ReplayOutcome& outcome,
                              ReplayReport* report) const {
  const Boundary& recorded = recorded_.boundary();
  std::string& text = report->text;
  text = fmt::format("replay {}: {}\n", printable(recorded_.path()), replay_result_name(report->result));
  const auto line = [&](std::string_view what, std::string_view said) {
    text += fmt::format("{:<9} {}\n", printable(what), printable(said));
  };
  if (!report->missing.empty()) line("missing", report->missing);
  line("recorded", fmt::format("rank {}, {}", recorded_.attempt().rank, recorded.describe()));
  line("replayed", outcome.found ? outcome.found->describe() : "everything was finite");
  if (report->result == ReplayResult::kReproduced || report->bits == Bits::kDiffer) {
    line("place", "the same stage, tensor, index and classes");
    if (experiment.is_plain()) line("bits", describe_bits(*report, outcome));
  }
  line("layers",
       outcome.first_dirty.empty()
           ? "every layer was finite"
           : fmt::format("last clean layer {}, first dirty {}",
                         outcome.last_clean.empty() ? "none" : outcome.last_clean, outcome.first_dirty));
  if (batch_is_loaded_) line("batch", "made again by the trainer: the bundle holds none");
  if (recorded_.state_source() != "bundle") line("state", "of checkpoint " + recorded_.state_source());
  for (const std::string& setting : experiment.texts) line("set", setting);
  for (const auto& [what, said] : outcome.notes) line(what, said);
  line("weights", outcome.weights_untouched ? "untouched" : "CHANGED");
  if (!log_failure_.empty()) line("log", "not kept: " + log_failure_);
}

namespace {

// A search of a large batch asks for many subsets that are made of many runs: of those the log has a digest.
void put_kept(const std::vector<RecordedSample>& kept, nlohmann::ordered_json* line) {
  constexpr std::size_t kMostRanges = 64;
  std::vector<std::string> ranges = ranges_of(kept);
  if (ranges.size() <= kMostRanges) {
    (*line)["kept"] = std::move(ranges);
    return;
  }
  (*line)["kept_samples"] = kept.size();
  (*line)["kept_sha256"] = hex(sha256(fmt::format("{}", fmt::join(ranges, ","))));
}

}  // namespace

void Replay::Impl::keep_experiment(const Experiment& experiment, const ReplayOutcome& outcome,
                                   const ReplayReport& report) {
  nlohmann::ordered_json line = {{"set", experiment.texts}, {"input", recorded_.content_id()}};
  if (experiment.is_subset) put_kept(experiment.kept, &line);
  line["batch"] = outcome.batch_sha256;
  line["state"] = recorded_.state_source();
  line["result"] = replay_result_name(report.result);
  line["found"] = outcome.found ? outcome.found->describe() : "everything was finite";
  keep("replayed", line);
}

void Replay::Impl::keep(const std::string& name, const nlohmann::ordered_json& fields) {
  if (Status s = log_.keep(name, fields); !s.ok()) log_failure_ = s.message();
}

std::string Replay::Impl::environment_difference() const {
  return holdfast::environment_difference(recorded_.environment(),
                                          describe_environment(trainer_.environment));
}

ReplayReport Replay::Impl::run(const std::vector<std::string>& settings) {
  Experiment experiment;
  experiment.texts = settings;
  std::string missing = open();
  if (missing.empty()) missing = split(settings, &experiment);
  return missing.empty() ? make(experiment) : refuse(missing);
}

// ---- the public face

Replay::Replay(FileSystem& files, std::string bundle, ReplayTrainer trainer, std::string run_dir)
    : impl_(std::make_unique<Impl>(files, std::move(bundle), std::move(trainer), std::move(run_dir))) {}
Replay::~Replay() = default;

ReplayReport Replay::run(const std::vector<std::string>& settings) try {
  return impl_->run(settings);
} catch (const std::exception& error) {
  return impl_->refuse(printable(error.what()));
} catch (...) {
  return impl_->refuse("exception of unknown type");
}

ReplayReport Replay::shrink(const std::vector<std::string>& settings, std::uint64_t most_replays) try {
  return impl_->shrink(settings, most_replays);
} catch (const std::exception& error) {
  return impl_->refuse(printable(error.what()));
} catch (...) {
  return impl_->refuse("exception of unknown type");
}

ReplayReport Replay::one_factor(const std::vector<std::string>& settings, std::uint64_t most_replays) try {
  return impl_->one_factor(settings, most_replays);
} catch (const std::exception& error) {
  return impl_->refuse(printable(error.what()));
} catch (...) {
  return impl_->refuse("exception of unknown type");
}

}  // namespace holdfast
