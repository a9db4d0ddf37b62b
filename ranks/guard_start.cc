// The start of a run, on all ranks.
#include <algorithm>
#include <cmath>
#include <filesystem>

#include "guard_impl.h"
#include "holdfast/collectives/hardware.h"
#include "holdfast/coord/departure_log.h"
#include "holdfast/coord/policy.h"
#include "holdfast/coord/state.pb.h"

namespace holdfast {
namespace {

std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<std::int64_t>(std::ceil(seconds * 1000)));
}

}  // namespace

// Collective. The rank that reports a departure need not be rank 0, but it is rank 0's folder that it writes
// to.
Status StepGuard::Impl::start_watchdog() {
  if (!options_.watchdog) return Status();
  // Rank 0's word on what decides which collectives follow: policies are compared in the first attempt only.
  Bytes folder = policy_.side_channel() ? "+" : "-";
  if (!options_.run_dir.empty()) folder += std::filesystem::absolute(options_.run_dir).string();
  if (Status s = collective_.broadcast(&folder); !s.ok()) return s;
  const bool side_channel = folder.starts_with('+');
  folder.erase(0, 1);
  Watchdog::Options options;
  options.deadline = milliseconds(policy_.attempt_deadline_seconds());
  options.floor = milliseconds(policy_.attempt_deadline_floor_seconds());
  options.side_channel = side_channel;
  asks_peers_ = side_channel && collective_.size() > 1;
  options.asked_to_end = options_.asked_to_end;
  options.before_leaving = options_.before_leaving;
  options.health = [&transport = collective_] { return transport.health(); };
  options.abort = [&transport = collective_] { transport.abort(); };
  if (coordinator_) {
    options.heard = [coordinator = coordinator_.get()](std::vector<RankReport> reports) {
      coordinator->heard(std::move(reports));
    };
  }
  if (!folder.empty()) {
    // There is nobody left to tell of a failure, and the same is on stderr.
    options.record = [folder](const Departure& departure) {
      static_cast<void>(append_departure(folder, departure));
    };
  }
  return Watchdog::create(collective_, options, &watchdog_);
}

Status StepGuard::Impl::gather_placement() {
  Topology topology;
  RankPlacement placement = detect_placement(collective_.rank());
  placement.axes = options_.axes;
  if (Status s = gather_topology(collective_, std::move(placement), &topology); !s.ok()) return s;
  topology_map_ = topology.map();
  if (coordinator_) coordinator_->run_started(epoch_, std::move(topology));
  return Status();
}

Status StepGuard::Impl::agree_on_groups() {
  if (Status s = ReplicaGroups::agree(collective_, options_.axes, options_.replica_group, &groups_); !s.ok())
    return s;
  replicas_ = groups_.members(groups_.group_of(collective_.rank()));
  place_ = std::ranges::find(replicas_, collective_.rank()) - replicas_.begin();
  group_coefficient_ = agreement_coefficient(collective_.rank(), replicas_);
  return Status();
}

void StepGuard::Impl::scale_loss() {
  const Policy::LossScale& policy = policy_.loss_scale();
  scaler_.emplace(LossScaleOptions{policy.initial(), policy.largest(), policy.smallest(),
                                   policy.growth_interval(), policy.hysteresis()});
}

// Collective: where rank 0 says that the run is.
Status StepGuard::Impl::take_position() {
  RunState position;
  if (coordinator_) {
    const RunState& memory = coordinator_->memory();
    position.set_epoch(memory.epoch());
    position.set_attempt(memory.attempt());
    position.set_update(memory.update());
    position.set_skips(memory.skips());
    if (memory.has_loss_scale()) *position.mutable_loss_scale() = memory.loss_scale();
  }
  Bytes bytes = position.SerializeAsString();
  if (Status s = collective_.broadcast(&bytes); !s.ok()) return s;
  if (!position.ParseFromString(bytes)) return Status::internal("malformed position from rank 0");
  epoch_ = position.epoch();
  attempt_ = position.attempt();
  updates_ = position.update();
  skips_ = position.skips();
  return agree_on_status(collective_, take_loss_scale(position));
}

// What the policy of this start no longer allows is brought to the nearest that it does.
Status StepGuard::Impl::take_loss_scale(const RunState& position) {
  if (!scaler_ || !position.has_loss_scale()) return Status();
  const LossScaleOptions& options = scaler_->options();
  const auto& saved = position.loss_scale();
  return scaler_->restore({std::clamp(saved.scale(), options.smallest, options.largest),
                           std::min(saved.clean_updates(), options.growth_interval - 1),
                           std::min(saved.overflows_to_halve(), options.hysteresis)});
}

Status StepGuard::create(Collective& collective, const GuardOptions& options,
                         std::unique_ptr<StepGuard>* out) {
  Policy policy;
  std::unique_ptr<Coordinator> coordinator;
  Status status = parse_policy(options.policy, &policy);
  if (status.ok() && options.expected_ranks != 0 && options.expected_ranks != collective.size()) {
    status = {StatusCode::kRanksDisagree, std::to_string(options.expected_ranks) +
                                              " ranks are expected, but " +
                                              std::to_string(collective.size()) + " take part"};
  }
  const bool has_checkpoints = options.checkpoints.interval_attempts != 0;
  if (status.ok() && !has_checkpoints) status = check_can_roll_back(policy);
  if (status.ok() && has_checkpoints && collective.rank() == 0 && options.run_dir.empty()) {
    status = Status::usage("checkpoints need a run folder");
  }
  if (status.ok() && collective.rank() == 0) {
    status = options.resume ? Coordinator::resume(policy, options.run_dir, &coordinator)
                            : Coordinator::create(policy, options.run_dir, &coordinator);
  }
  if (status.ok() && coordinator && options.metrics_port) {
    status = coordinator->serve_metrics(options.metrics_address, *options.metrics_port);
  }
  if (Status s = agree_on_status(collective, status); !s.ok()) return s;
  auto impl = std::make_unique<Impl>(collective, policy, options, std::move(coordinator));
  if (options.loss_scaling) impl->scale_loss();
  if (Status s = impl->agree_on_groups(); !s.ok()) return s;
  if (Status s = impl->take_position(); !s.ok()) return s;
  if (Status s = impl->start_watchdog(); !s.ok()) return s;
  if (Status s = impl->gather_placement(); !s.ok()) return s;
  out->reset(new StepGuard(std::move(impl)));
  return Status();
}

}  // namespace holdfast
