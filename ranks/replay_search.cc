// Many replays of one bundle: the fewest samples of its batch that still do it, and one factor at a time.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>
#include <sstream>

#include "holdfast/coord/printable.h"
#include "holdfast/minimal_subset.h"
#include "replay_impl.h"

namespace holdfast {
namespace {

constexpr std::size_t kMostSamplesShown = 32;
constexpr std::size_t kMostSamplesTried = 32;  // by one_factor()
constexpr std::int64_t kMostSamples = 1 << 16;

}  // namespace

// All that are not blanked anyway, by micro-batch.
std::string Replay::Impl::find_samples(const Experiment& base, std::vector<RecordedSample>* samples) const {
  const RecordedAttempt& attempt = recorded_.attempt();
  std::set<int> micro_batches;
  for (const RecordedTensor& tensor : attempt.batch) micro_batches.insert(tensor.micro_batch);
  for (const int m : micro_batches) {
    const std::int64_t count = count_samples(attempt, m);
    if (count == 0 || count + std::ssize(*samples) > kMostSamples)
      return fmt::format(
          "samples that can be told apart: the tensors of {} have no first extent in common, or too large a "
          "one",
          m < 0 ? "the batch" : fmt::format("micro-batch {}", m));
    for (std::int64_t i = 0; i < count; ++i) {
      const RecordedSample sample{m, i};
      if (std::ranges::find(base.blanked, sample) == base.blanked.end()) samples->push_back(sample);
    }
  }
  return "";
}

// " (id 4711)", or nothing where ids are not on record.
std::string Replay::Impl::id_of(const RecordedSample& sample) const {
  const std::string* ids = recorded_.attempt().fact(samples_fact(sample.micro_batch));
  if (ids == nullptr) return "";
  std::istringstream all(*ids);
  std::string id;
  for (std::int64_t i = 0; i <= sample.index; ++i) {
    if (!std::getline(all, id, ',')) return "";
  }
  return " (id " + printable(id) + ")";
}

std::string Replay::Impl::describe_set(const ReplayReport& report, std::size_t of,
                                       std::uint64_t replays) const {
  const std::vector<RecordedSample>& samples = report.samples;
  std::string text = fmt::format("{} of {} samples", samples.size(), of);
  if (samples.empty())
    return fmt::format("{}: it happens with all of them blanked, {} replays", text, replays);
  std::vector<std::string> shown;
  for (std::size_t i = 0; i < std::min(samples.size(), kMostSamplesShown); ++i)
    shown.push_back(name_of(samples[i]) + id_of(samples[i]));
  if (samples.size() > kMostSamplesShown)
    shown.push_back(fmt::format("{} more", samples.size() - kMostSamplesShown));
  return fmt::format(
      "{}: {}; {}, {} replays", text, fmt::join(shown, ", "),
      report.is_minimal ? "without any one of them it does not happen" : "perhaps not the fewest", replays);
}

// `base` has been made and reproduces it.
ReplayReport Replay::Impl::search(const Experiment& base, std::uint64_t most_replays, std::string* shrunk) {
  const auto failed = [&](ReplayReport why) {
    *shrunk = "nothing: " + why.missing;
    return why;
  };
  std::vector<RecordedSample> all;
  if (const std::string missing = find_samples(base, &all); !missing.empty()) return failed(refuse(missing));
  std::uint64_t replays = 0;
  const auto with = [&](const std::vector<std::size_t>& members) {
    Experiment experiment = base;
    experiment.is_subset = true;
    for (std::size_t i = 0, next = 0; i < all.size(); ++i) {
      const bool kept = next < members.size() && members[next] == i;
      if (kept) ++next;
      (kept ? experiment.kept : experiment.blanked).push_back(all[i]);
    }
    ++replays;
    return make(experiment);
  };
  ReplayReport last;
  const auto fails = [&](const std::vector<std::size_t>& members) -> std::optional<bool> {
    last = with(members);
    if (last.result == ReplayResult::kNotReplayable) return std::nullopt;
    return last.result == ReplayResult::kReproduced;
  };
  const MinimalSubset found = minimal_subset(all.size(), most_replays, fails);
  if (last.result == ReplayResult::kNotReplayable && replays > 0) return failed(last);
  // Once more: what is told is what was seen of the set itself.
  ReplayReport report = with(found.members);
  if (report.result == ReplayResult::kNotReplayable) return failed(report);
  const bool verified = report.result == ReplayResult::kReproduced;
  report.is_minimal = verified && found.is_minimal;
  for (const std::size_t i : found.members) report.samples.push_back(all[i]);
  *shrunk = verified ? describe_set(report, all.size(), replays)
                     : "nothing: the same samples do not give the same twice";
  keep("shrunk", {{"set", base.texts},
                  {"input", recorded_.content_id()},
                  {"samples", ranges_of(report.samples)},
                  {"of", all.size()},
                  {"replays", replays},
                  {"minimal", report.is_minimal},
                  {"result", replay_result_name(report.result)},
                  {"found", report.found ? report.found->describe() : "everything was finite"},
                  {"last_clean", report.last_clean},
                  {"first_dirty", report.first_dirty}});
  return report;
}

ReplayReport Replay::Impl::shrink(const std::vector<std::string>& settings, std::uint64_t most_replays) {
  ReplayReport base = run(settings);
  if (base.result != ReplayResult::kReproduced) return base;
  Experiment experiment;
  experiment.texts = settings;
  static_cast<void>(split(settings, &experiment));  // run() took it
  std::string shrunk;
  ReplayReport report = search(experiment, most_replays, &shrunk);
  if (report.result != ReplayResult::kNotReplayable) report.text += fmt::format("shrunk    {}\n", shrunk);
  return report;
}

ReplayReport Replay::Impl::one_factor(const std::vector<std::string>& settings, std::uint64_t most_replays) {
  ReplayReport base = run(settings);
  if (base.result != ReplayResult::kReproduced) return base;
  Experiment experiment;
  experiment.texts = settings;
  static_cast<void>(split(settings, &experiment));
  std::string said;
  const ReplayReport shrunk = search(experiment, most_replays, &said);
  std::vector<std::pair<std::string, std::string>> factors;  // with what is shown
  if (trainer_.factors) {
    for (const std::string& factor : trainer_.factors(recorded_.attempt()))
      factors.emplace_back(factor, printable(factor));
  }
  const std::size_t samples = std::min(shrunk.samples.size(), kMostSamplesTried);
  for (std::size_t i = 0; i < samples; ++i) {
    const RecordedSample& sample = shrunk.samples[i];
    factors.emplace_back("sample." + name_of(sample) + "=0",
                         "sample." + name_of(sample) + "=0" + id_of(sample));
  }
  ReplayReport report = std::move(base);
  report.samples = shrunk.samples;
  report.is_minimal = shrunk.is_minimal;
  report.text += fmt::format("shrunk    {}\n", said);
  nlohmann::ordered_json table = nlohmann::ordered_json::array();
  std::vector<std::string> remedies;
  for (const auto& [factor, shown] : factors) {
    std::vector<std::string> with = settings;
    with.push_back(factor);
    const ReplayReport tried = run(with);
    report.factors.emplace_back(factor, tried.result);
    if (tried.result == ReplayResult::kNotReproduced) remedies.push_back(shown);
    const std::string found = tried.result == ReplayResult::kNotReplayable ? tried.missing
                              : tried.found                                ? tried.found->describe()
                                                                           : "everything was finite";
    table.push_back({{"factor", factor}, {"result", replay_result_name(tried.result)}, {"found", found}});
    report.text +=
        fmt::format("factor    {:<28} {:<15} {}\n", shown, replay_result_name(tried.result), found);
  }
  report.text += fmt::format(
      "alone     {}\n", remedies.empty() ? "none of them takes it away"
                                         : fmt::format("each takes it away: {}", fmt::join(remedies, ", ")));
  keep("factors_tried", {{"set", settings}, {"input", recorded_.content_id()}, {"factors", table}});
  return report;
}

}  // namespace holdfast
