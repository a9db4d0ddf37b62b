#include "holdfast/coord/metrics.h"

#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <nlohmann/json.hpp>

#include "holdfast/coord/rate_rules.h"

namespace holdfast {
namespace {

using Type = MetricFamily::Type;
using Sample = MetricFamily::Sample;

constexpr std::array<const char*, 5> kClassNames = {"nan", "pos_inf", "neg_inf", "mixed", "none"};

std::size_t class_of(const BadCounts& found) {
  const bool has[] = {found.nan > 0, found.pos_inf > 0, found.neg_inf > 0};
  const int classes = has[0] + has[1] + has[2];
  if (classes == 0) return 4;
  if (classes > 1) return 3;
  return has[0] ? 0 : has[1] ? 1 : 2;
}

std::string stage_label(std::size_t stage) {
  return stage < kStageCount ? std::string(stage_name(static_cast<Stage>(stage))) : "none";
}

// Names come from the trainer and may hold any bytes; the JSON library knows what UTF-8 is.
std::string as_utf8(const std::string& text) {
  using Json = nlohmann::json;
  return Json::parse(Json(text).dump(-1, ' ', false, Json::error_handler_t::replace)).get<std::string>();
}

std::string escaped(const std::string& label) {
  std::string text;
  for (const char c : label) {
    if (c == '\n') {
      text += "\\n";
    } else {
      if (c == '\\' || c == '"') text += '\\';
      text += c;
    }
  }
  return text;
}

std::string number(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "+Inf" : "-Inf";
  return fmt::format("{}", value);
}

double as_double(const std::atomic<std::uint64_t>& value) {
  return static_cast<double>(value.load(std::memory_order_relaxed));
}

double steady_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Sample plain(double value) { return {{}, value}; }

double left(std::uint64_t most, const std::atomic<std::uint64_t>& used) {
  const std::uint64_t now = used.load(std::memory_order_relaxed);
  return now < most ? static_cast<double>(most - now) : 0;
}

}  // namespace

std::string metrics_text(const std::vector<MetricFamily>& families) {
  std::string text;
  for (const MetricFamily& family : families) {
    if (family.samples.empty()) continue;
    text += fmt::format("# HELP {0} {1}\n# TYPE {0} {2}\n", family.name, family.help,
                        family.type == Type::kCounter ? "counter" : "gauge");
    for (const Sample& sample : family.samples) {
      text += family.name;
      for (std::size_t i = 0; i < sample.labels.size(); ++i) {
        const auto& [name, value] = sample.labels[i];
        text += fmt::format("{}{}=\"{}\"", i == 0 ? "{" : ",", name, escaped(value));
      }
      text += fmt::format("{} {}\n", sample.labels.empty() ? "" : "}", number(sample.value));
    }
  }
  return text;
}

void NamedValues::set(std::string_view name, double value) {
  const std::size_t size = size_.load(std::memory_order_relaxed);
  std::size_t i = 0;
  while (i < size && slots_[i].name != name) ++i;
  if (i == kMost) return;
  slots_[i].value.store(value, std::memory_order_relaxed);
  if (i < size) return;
  slots_[i].name = name;
  size_.store(size + 1, std::memory_order_release);
}

RunMetrics::RunMetrics(std::vector<std::string> rules, std::uint64_t most_total,
                       std::uint64_t most_consecutive)
    : most_total_(most_total), most_consecutive_(most_consecutive) {
  rules.emplace_back(kCalibrationRule);
  for (std::string& rule : rules) {
    windows_.push_back(std::make_unique<Window>());
    windows_.back()->rule = std::move(rule);
  }
}

void RunMetrics::count_skip(std::optional<Stage> stage, const BadCounts& found) {
  add(&skips_made_[stage ? static_cast<std::size_t>(*stage) : kStageCount][class_of(found)], 1);
}

void RunMetrics::count_alert(std::string_view rule) {
  for (const auto& window : windows_) {
    if (window->rule == rule) add(&window->alerts, 1);
  }
}

void RunMetrics::set_position(std::uint64_t epoch, std::uint64_t attempt, std::uint64_t update,
                              std::uint64_t skips) {
  epoch_.store(epoch, std::memory_order_relaxed);
  attempt_.store(attempt, std::memory_order_relaxed);
  update_.store(update, std::memory_order_relaxed);
  skips_.store(skips, std::memory_order_relaxed);
}

void RunMetrics::set_skips_charged(std::uint64_t total, std::uint64_t consecutive) {
  total_.store(total, std::memory_order_relaxed);
  consecutive_.store(consecutive, std::memory_order_relaxed);
}

void RunMetrics::set_window(std::size_t rule, std::uint64_t skips, std::uint64_t attempts, bool raised) {
  Window& window = *windows_[rule];
  window.skips.store(skips, std::memory_order_relaxed);
  window.attempts.store(attempts, std::memory_order_relaxed);
  window.raised.store(raised, std::memory_order_relaxed);
}

void RunMetrics::set_calibration_alert(bool raised) {
  windows_.back()->raised.store(raised, std::memory_order_relaxed);
}

void RunMetrics::set_last_known_good(std::uint64_t attempt) {
  last_known_good_.store(attempt, std::memory_order_relaxed);
  last_known_good_at_.store(steady_seconds(), std::memory_order_relaxed);
  add(&checkpoints_, 1);
}

void RunMetrics::set_loss_scale(double scale, double smallest) {
  smallest_scale_.store(smallest, std::memory_order_relaxed);
  loss_scale_.store(scale, std::memory_order_relaxed);
}

std::uint64_t RunMetrics::skips_made() const {
  std::uint64_t sum = 0;
  for (const auto& of_stage : skips_made_) {
    for (const Number& count : of_stage) sum += count.load(std::memory_order_relaxed);
  }
  return sum;
}

RunMetrics::Position RunMetrics::position() const {
  const auto get = [](const Number& number) { return number.load(std::memory_order_relaxed); };
  // Attempts are not counted but summed, so that they always reconcile.
  return {get(epoch_),
          get(attempt_),
          get(update_),
          get(skips_),
          get(updates_) + get(ended_) + get(rollbacks_) + skips_made(),
          get(replica_proofs_)};
}

std::optional<double> RunMetrics::loss_scale() const {
  const double scale = loss_scale_.load(std::memory_order_relaxed);
  return scale > 0 ? std::optional<double>(scale) : std::nullopt;
}

std::vector<MetricFamily> RunMetrics::collect() const {
  std::vector<MetricFamily> all;
  const auto family = [&](const char* name, Type type, const char* help) -> std::vector<Sample>& {
    all.push_back({std::string("holdfast_") + name, help, type, {}});
    return all.back().samples;
  };
  family("info", Type::kGauge, "Always 1; the version is a label.") = {{{{"version", HOLDFAST_VERSION}}, 1}};
  family("running", Type::kGauge, "1 while the run goes on, 0 once it has ended in order.") = {
      plain(running_.load(std::memory_order_relaxed) ? 1 : 0)};
  family("epoch", Type::kGauge, "Number of starts of the run.") = {plain(as_double(epoch_))};
  family("attempts_total", Type::kCounter, "Attempts decided since this process began.") = {
      plain(static_cast<double>(position().attempts_made))};
  family("updates_total", Type::kCounter,
         "Attempts whose update was applied.") = {plain(as_double(updates_))};

  auto& skips =
      family("skips_total", Type::kCounter,
             "Skipped attempts by the earliest non-finite stage and the class of what was found there.");
  for (std::size_t stage = 0; stage < kStages; ++stage) {
    for (std::size_t c = 0; c < kClasses; ++c) {
      const double count = as_double(skips_made_[stage][c]);
      // The three classes of a stage begin at 0, so that a first skip is an increase.
      if (count > 0 || (stage < kStageCount && c < 3)) {
        skips.push_back({{{"stage", stage_label(stage)}, {"class", kClassNames[c]}}, count});
      }
    }
  }
  family("calibration_skips_total", Type::kCounter,
         "Skips that loss scaling was expected to make.") = {plain(as_double(calibration_skips_))};
  family("incidents_total", Type::kCounter,
         "Attempts that were not clean, stops included.") = {plain(as_double(incidents_))};

  family("replica_proofs_total", Type::kCounter,
         "Proofs in which all replicas agreed.") = {plain(as_double(replica_proofs_))};
  family("rollbacks_total", Type::kCounter,
         "Attempts after which all ranks went back to a checkpoint.") = {plain(as_double(rollbacks_))};
  family("checkpoints_published_total", Type::kCounter,
         "Checkpoints on disk that every rank found clean.") = {plain(as_double(checkpoints_))};
  family("checkpoints_failed_total", Type::kCounter, "Checkpoints that were not published.") = {
      {{{"reason", "not_written"}}, as_double(failed_checkpoints_[0])},
      {{{"reason", "non_finite"}}, as_double(failed_checkpoints_[1])}};
  family("bundles_published_total", Type::kCounter,
         "Incidents whose evidence is on disk.") = {plain(as_double(bundles_[0]))};
  family("bundles_failed_total", Type::kCounter,
         "Incidents whose evidence could not be kept.") = {plain(as_double(bundles_[1]))};
  if (const double at = last_known_good_at_.load(std::memory_order_relaxed); at > 0) {
    family("last_known_good_attempt", Type::kGauge,
           "Attempt that the newest checkpoint goes on with.") = {plain(as_double(last_known_good_))};
    family("last_known_good_age_seconds", Type::kGauge,
           "Time since the newest checkpoint was published.") = {plain(steady_seconds() - at)};
  }

  auto& alerts =
      family("alerts_raised_total", Type::kCounter, "Alerts raised by a rule on the rate of skips.");
  for (const auto& w : windows_) alerts.push_back({{{"rule", w->rule}}, as_double(w->alerts)});
  auto& raised = family("alert_active", Type::kGauge, "1 while the rule's alert is raised.");
  for (const auto& w : windows_) {
    raised.push_back({{{"rule", w->rule}}, w->raised.load(std::memory_order_relaxed) ? 1.0 : 0.0});
  }
  auto& ratios =
      family("skip_ratio", Type::kGauge, "Skips per attempt in the rule's window; 0 before the first.");
  for (std::size_t i = 0; i + 1 < windows_.size(); ++i) {
    const double attempts = as_double(windows_[i]->attempts);
    ratios.push_back(
        {{{"rule", windows_[i]->rule}}, attempts > 0 ? as_double(windows_[i]->skips) / attempts : 0});
  }

  family("skip_budget_left", Type::kGauge, "Skips that the policy still allows.") = {
      {{{"budget", "total"}}, left(most_total_, total_)},
      {{{"budget", "consecutive"}}, left(most_consecutive_, consecutive_)}};
  family("skip_budget_limit", Type::kGauge, "Skips that the policy allows.") = {
      {{{"budget", "total"}}, static_cast<double>(most_total_)},
      {{{"budget", "consecutive"}}, static_cast<double>(most_consecutive_)}};
  if (const auto scale = loss_scale()) {
    family("loss_scale", Type::kGauge, "Factor of the loss.") = {plain(*scale)};
    family("loss_scale_floor", Type::kGauge, "Smallest factor that the policy allows.") = {
        plain(smallest_scale_.load(std::memory_order_relaxed))};
  }
  auto& watched =
      family("watched_value", Type::kGauge, "Last value given to watch(), such as the gradient norm.");
  watched_.each([&](const std::string& name, double value) {
    watched.push_back({{{"name", as_utf8(name)}}, value});
  });
  auto& headroom = family("headroom_used_ratio", Type::kGauge,
                          "Last magnitude given to watch_headroom(), over the largest its type holds.");
  headroom_.each([&](const std::string& name, double value) {
    headroom.push_back({{{"tensor", as_utf8(name)}}, value});
  });
  return all;
}

}  // namespace holdfast
