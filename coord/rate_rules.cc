#include "holdfast/coord/rate_rules.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "holdfast/coord/incident.h"
#include "holdfast/coord/policy.pb.h"

namespace holdfast {
namespace {

void push_bounded(std::deque<SkipRecord>* skips, SkipRecord skip) {
  skips->push_back(std::move(skip));
  if (skips->size() > kMostSkipsRemembered) skips->pop_front();
}

class Tally {
 public:
  void add(const std::string& value) {
    if (!value.empty()) ++counts_[value];
  }
  MostFrequent most_frequent() const {
    MostFrequent most;
    for (const auto& [value, count] : counts_) {
      if (count > most.skips) most = {value, count};
    }
    return most;
  }

 private:
  std::map<std::string, std::uint64_t> counts_;
};

template <typename Wanted>
SkipProfile profile(const std::deque<SkipRecord>& skips, Wanted&& wanted) {
  SkipProfile result;
  Tally stages, ranks, hosts, tensors;
  for (const SkipRecord& skip : skips) {
    if (!wanted(skip)) continue;
    ++result.skips;
    if (skip.stage) stages.add(std::string(stage_name(*skip.stage)));
    if (skip.rank >= 0) ranks.add(std::to_string(skip.rank));
    hosts.add(skip.host);
    tensors.add(skip.tensor);
  }
  result.stage = stages.most_frequent();
  result.rank = ranks.most_frequent();
  result.host = hosts.most_frequent();
  result.tensor = tensors.most_frequent();
  return result;
}

}  // namespace

SkipRecord skip_record(const Incident& incident) {
  SkipRecord record;
  record.stage = incident.stage();
  const std::vector<Origin> origins = incident.origins();
  if (!origins.empty()) record.tensor = origins.front().finding.tensor;
  // The same sum, and the same update, is on every rank: in whose share it was found says nothing of a rank.
  if (record.stage == Stage::kReduction || record.stage == Stage::kOptimizer) return record;
  if (origins.size() == 1) {
    record.rank = origins.front().rank;
    record.host = origins.front().host;
  } else if (const RankView* view = incident.first_error(); origins.empty() && view != nullptr) {
    record.rank = view->rank;
    record.host = view->host;
  }
  return record;
}

double RateChange::fraction() const {
  return attempts == 0 ? 0.0 : static_cast<double>(skips) / static_cast<double>(attempts);
}

std::vector<std::string> RateChange::changed() const {
  std::vector<std::string> names;
  if (before.skips == 0) return names;
  if (in_window.stage.value != before.stage.value) names.emplace_back("stage");
  if (in_window.rank.value != before.rank.value) names.emplace_back("rank");
  if (in_window.host.value != before.host.value) names.emplace_back("host");
  if (in_window.tensor.value != before.tensor.value) names.emplace_back("tensor");
  return names;
}

RateRules::RateRules(const Policy& policy) {
  for (const Policy::RateRule& rule : policy.rate_rules()) {
    rules_.push_back({rule.name(), rule.window_attempts(), rule.max_skips(), rule.least_attempts(),
                      rule.action() != Policy::RateRule::WARN, rule.action() == Policy::RateRule::ROLL_BACK,
                      RateWindow(rule.window_attempts(), kMostSkipsRemembered)});
  }
}

void RateRules::count_attempt() {
  ++attempts_;
  for (Rule& rule : rules_) rule.window.advance(attempts_);
}

std::optional<RateRules::Broken> RateRules::broken_by_a_skip() const {
  for (const Rule& rule : rules_) {
    if (!rule.forbids_skips || attempts_ < rule.least_attempts || rule.window.skips() < rule.max_skips)
      continue;
    return Broken{
        fmt::format("rate rule '{}' allows {} skips in {} attempts, and this is number {} in {}", rule.name,
                    rule.max_skips, rule.window_attempts, rule.window.skips() + 1, rule.window.attempts()),
        rule.rolls_back};
  }
  return std::nullopt;
}

void RateRules::remember(SkipRecord skip) {
  for (Rule& rule : rules_) rule.window.add_skip(skip.attempt);
  push_bounded(&skips_, std::move(skip));
}

void RateRules::count_skip(SkipRecord skip) {
  skip.attempt = attempts_;
  remember(std::move(skip));
}

void RateRules::count_pending(SkipRecord skip) {
  skip.attempt = attempts_;
  push_bounded(&pending_, std::move(skip));
}

void RateRules::settle_pending(bool charged) {
  if (charged) {
    for (SkipRecord& skip : pending_) remember(std::move(skip));
  }
  pending_.clear();
}

std::optional<RateChange> RateRules::next_change() {
  for (Rule& rule : rules_) {
    if (rule.forbids_skips) continue;
    const std::uint64_t skips = rule.window.skips();
    // It clears at half of what raises it, so that a rate at the limit does not flap.
    const bool raise = !rule.raised && skips > rule.max_skips && attempts_ >= rule.least_attempts;
    const bool clear = rule.raised && skips <= rule.max_skips / 2;
    if (!raise && !clear) continue;
    rule.raised = raise;
    return change_of(rule);
  }
  return std::nullopt;
}

RateChange RateRules::change_of(const Rule& rule) const {
  RateChange change{rule.name,
                    rule.raised,
                    rule.window.skips(),
                    rule.window.attempts(),
                    rule.window_attempts,
                    rule.max_skips,
                    {},
                    {}};
  const auto in_window = [&](const SkipRecord& skip) { return rule.window.holds(skip.attempt); };
  change.in_window = profile(skips_, in_window);
  change.before = profile(skips_, [&](const SkipRecord& skip) { return !in_window(skip); });
  return change;
}

std::vector<std::string> RateRules::names() const {
  std::vector<std::string> names;
  for (const Rule& rule : rules_) names.push_back(rule.name);
  return names;
}

RateRules::Window RateRules::window(std::size_t rule) const {
  const Rule& of = rules_[rule];
  return {of.window.skips(), of.window.attempts(), of.raised};
}

std::vector<std::string> RateRules::raised() const {
  std::vector<std::string> names;
  for (const Rule& rule : rules_) {
    if (rule.raised) names.push_back(rule.name);
  }
  return names;
}

void RateRules::restore(std::uint64_t attempts, std::deque<SkipRecord> skips, std::deque<SkipRecord> pending,
                        const std::vector<std::string>& raised) {
  attempts_ = attempts;
  skips_ = std::move(skips);
  pending_ = std::move(pending);
  for (Rule& rule : rules_) {
    rule.window = RateWindow(rule.window_attempts, kMostSkipsRemembered);
    rule.window.advance(attempts_);
    for (const SkipRecord& skip : skips_) rule.window.add_skip(skip.attempt);
    // A rule that the policy no longer has is forgotten.
    rule.raised = std::ranges::find(raised, rule.name) != raised.end();
  }
}

}  // namespace holdfast
