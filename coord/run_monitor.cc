#include "holdfast/coord/run_monitor.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>

#include "durable_file.h"
#include "holdfast/coord/event_log.h"
#include "holdfast/coord/state.h"
#include "holdfast/coord/state.pb.h"
#include "holdfast/coord/stop_request.h"

namespace holdfast {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::chrono::seconds kInterval{1};
constexpr double kLeastInterval = 0.5;  // seconds, for a rate
constexpr int kStatusVersion = 1;

// Of thousands of ranks, those that the others wait for are of interest.
constexpr std::size_t kMostRanksShown = 256;

double steady_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

bool is_behind(const RankReport& a, const RankReport& b) {
  if (!a.place || !b.place) return !a.place && b.place;
  return a.place->behind(*b.place);
}

Json ranks_json(std::vector<RankReport> reports) {
  if (reports.size() > kMostRanksShown) {
    std::ranges::stable_sort(reports, is_behind);
    reports.resize(kMostRanksShown);
  }
  Json ranks = Json::array();
  for (const RankReport& report : reports) {
    Json json = {{"rank", report.who.rank}, {"host", report.who.host}, {"pid", report.who.pid}};
    json["attempt"] = report.place ? Json(report.place->attempt) : Json(nullptr);
    json["phase"] = report.place ? Json(phase_name(report.place->phase)) : Json(nullptr);
    json["seconds_ago"] = report.place ? Json(std::round(report.seconds_ago * 10) / 10) : Json(nullptr);
    ranks.push_back(std::move(json));
  }
  return ranks;
}

}  // namespace

RunMonitor::RunMonitor(const RunMetrics& metrics) : metrics_(metrics) {}

RunMonitor::~RunMonitor() { finish(std::nullopt); }

void RunMonitor::start(const std::string& run_dir, const RunState& state, const Topology& topology) {
  run_dir_ = run_dir;
  auto mine = std::make_unique<RunState>();
  mine->set_epoch(state.epoch());
  mine->set_claimed_epoch(state.claimed_epoch());
  mine->set_holder(state.holder());
  mine_ = std::move(mine);
  std::vector<RankReport> silent;
  for (const RankPlacement& place : topology.placements()) {
    silent.push_back({{place.rank, place.host, place.pid}, std::nullopt, 0});
  }
  heard(std::move(silent));
  look_for_stop();  // one that was meant for an earlier run
  write(std::nullopt);
  thread_ = std::thread([this] { watch(); });
}

void RunMonitor::finish(std::optional<int> exit_code) {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    finished_ = true;
  }
  wake_.notify_all();
  thread_.join();
  write(exit_code);
}

std::string RunMonitor::stop_requested_by() const {
  const std::lock_guard lock(mutex_);
  return stop_requested_by_;
}

void RunMonitor::heard(std::vector<RankReport> reports) {
  const std::lock_guard lock(mutex_);
  reports_ = std::move(reports);
  heard_at_ = steady_seconds();
}

void RunMonitor::watch() {
  std::unique_lock lock(mutex_);
  while (!wake_.wait_for(lock, kInterval, [this] { return finished_; })) {
    lock.unlock();
    look_for_stop();
    write(std::nullopt);
    lock.lock();
  }
}

std::string RunMonitor::taken_over_by() const {
  const std::lock_guard lock(mutex_);
  return taken_over_by_;
}

// Nobody gives a folder back, so once is enough.
bool RunMonitor::look_for_takeover() {
  if (taken_over()) return true;
  const std::string by = holdfast::taken_over_by(run_dir_, *mine_);
  if (by.empty()) return false;
  const std::lock_guard lock(mutex_);
  taken_over_by_ = by;
  taken_over_.store(true, std::memory_order_relaxed);
  return true;
}

void RunMonitor::look_for_stop() {
  if (look_for_takeover()) return;
  const auto request = take_stop_request(run_dir_);
  if (!request || request->holder != mine_->holder()) return;
  const std::lock_guard lock(mutex_);
  stop_requested_by_ = request->by;
  stop_requested_.store(true, std::memory_order_relaxed);
}

std::string RunMonitor::status_text(std::optional<int> exit_code) {
  const RunMetrics::Position at = metrics_.position();
  const double now = steady_seconds();
  const double seconds = now - written_at_;
  if (written_at_ == 0 || seconds > kLeastInterval) {  // the last write may follow on the one before
    if (written_at_ > 0) rate_ = static_cast<double>(at.attempts_made - attempts_before_) / seconds;
    written_at_ = now;
    attempts_before_ = at.attempts_made;
  }
  std::vector<RankReport> reports;
  {
    const std::lock_guard lock(mutex_);
    reports = reports_;
    for (RankReport& report : reports) report.seconds_ago += now - heard_at_;
  }
  const std::size_t all_ranks = reports.size();
  Json json = {{"version", kStatusVersion}, {"time", utc_time()}, {"holder", mine_->holder()}};
  json["exit_code"] = exit_code ? Json(*exit_code) : Json(nullptr);
  json["epoch"] = at.epoch;
  json["attempt"] = at.attempt;
  json["update"] = at.update;
  json["skips"] = at.skips;
  json["attempts_per_second"] = rate_ ? Json(*rate_) : Json(nullptr);
  json["replica_proofs"] = at.replica_proofs;
  const auto scale = metrics_.loss_scale();
  json["loss_scale"] = scale ? Json(*scale) : Json(nullptr);
  json["ranks"] = ranks_json(std::move(reports));
  if (all_ranks > kMostRanksShown) json["ranks_omitted"] = all_ranks - kMostRanksShown;
  return json.dump(1, ' ', true, Json::error_handler_t::replace) + "\n";
}

void RunMonitor::write(std::optional<int> exit_code) {
  if (look_for_takeover()) return;
  Status status = replace_file_unsynced(run_dir_ + "/metrics.prom", metrics_text(metrics_.collect()));
  const Status second = replace_file_unsynced(run_dir_ + "/status.json", status_text(exit_code));
  if (status.ok()) status = second;
  if (status.ok() || write_failed_) return;
  write_failed_ = true;
  std::fprintf(stderr, "holdfast: %s; training goes on, and the status of the run is not kept up\n",
               status.message().c_str());
}

}  // namespace holdfast
