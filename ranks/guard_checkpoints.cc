// Checkpoints, going back to them, the proof that replicas agree and the sweep for what is not finite.
#include <algorithm>
#include <chrono>
#include <filesystem>
#include <ranges>
#include <thread>
#include <utility>

#include "guard_impl.h"
#include "holdfast/coord/policy.h"
#include "holdfast/coord/state.pb.h"

namespace holdfast {
namespace {

// Restoring and waiting for a disk take as long as they take.
class PausedWatchdog {
 public:
  explicit PausedWatchdog(Watchdog* watchdog) : watchdog_(watchdog) {
    if (watchdog_ != nullptr) watchdog_->board().pause();
  }
  ~PausedWatchdog() {
    if (watchdog_ != nullptr) watchdog_->board().resume();
  }
  PausedWatchdog(const PausedWatchdog&) = delete;
  PausedWatchdog& operator=(const PausedWatchdog&) = delete;

 private:
  Watchdog* const watchdog_;
};

bool due(std::uint64_t attempt, std::uint64_t interval) { return interval != 0 && attempt % interval == 0; }

// These the ranks know together; a collective that failed they do not.
bool is_agreed(StatusCode code) { return code != StatusCode::kInternal && code != StatusCode::kRankMissing; }

}  // namespace

// The windows of the spike detectors decide about skips, so a resumed run needs them.
StateBytes StepGuard::Impl::own_state() {
  const auto save = [this] {
    DetectorStates all;
    for (const auto& [name, detector] : detectors_) {
      DetectorStates::Detector* to = all.add_detectors();
      to->set_name(name);
      for (const double log : detector.logs()) to->add_logs(log);
    }
    return all.SerializeAsString();
  };
  const auto load = [this](const Bytes& bytes) {
    DetectorStates all;
    if (!all.ParseFromString(bytes)) return Status::internal("the spike detectors' windows cannot be read");
    detectors_.clear();
    for (const auto& from : all.detectors()) {
      SpikeDetector& detector = detectors_.try_emplace(from.name(), spike_options()).first->second;
      detector.restore({from.logs().begin(), from.logs().end()});
    }
    return Status();
  };
  return {"holdfast/spike_detectors", save, load, Held::kReplicated};
}

Status StepGuard::Impl::register_state(TrainingState state) {
  if (sweep_) return Status::usage("register_state() a second time: the state is told once, all of it");
  const PausedWatchdog paused(watchdog_.get());
  state_ = std::move(state);
  state_.add(own_state());
  if (Status s = agree_on_status(collective_, state_.check()); !s.ok()) return s;
  sweep_ = std::make_unique<StateSweep>(state_, policy_.prove_optimizer_state());
  proof_wanted_ = true;
  bool restores = false;
  if (Status s = agree_on_settings(); !s.ok()) return s;
  if (options_.checkpoints.interval_attempts == 0) return choose_beginning(&restores);

  std::string folder;
  CheckpointOptions checkpoints = options_.checkpoints;
  if (coordinator_) {
    folder = std::filesystem::absolute(checkpoints_path(options_.run_dir)).string();
    checkpoints.before_publication = coordinator_->still_holds();
  }
  if (Status s = CheckpointStore::create(collective_, real_file_system(), folder, checkpoints, state_,
                                         groups_, &store_);
      !s.ok()) {
    return s;
  }
  if (coordinator_) tell_generations();
  if (Status s = choose_beginning(&restores); !s.ok()) return s;
  if (restores) return restore();
  if (coordinator_) coordinator_->begun_anew();
  if (scaler_) scale_loss();
  if (Status s = take_position(); !s.ok()) return s;
  save_checkpoint();  // there is always something to go back to
  return Status();
}

// Collective: policies are compared in each attempt, but what follows here depends on them already.
Status StepGuard::Impl::agree_on_settings() {
  const Bytes mine =
      std::to_string(policy_hash_) + " " + std::to_string(options_.checkpoints.interval_attempts);
  Bytes rank_0s = mine;
  if (Status s = collective_.broadcast(&rank_0s); !s.ok()) return s;
  Status status;
  if (rank_0s != mine) {
    status = {StatusCode::kRanksDisagree, "policy or checkpoint interval are not those of rank 0"};
  }
  return agree_on_status(collective_, status);
}

// Collective: what rank 0 knows of generations, and of the run that is resumed, decides.
Status StepGuard::Impl::choose_beginning(bool* restores) {
  Status status;
  Bytes word = "anew";
  if (coordinator_ && !coordinator_->may_begin_anew()) {
    if (store_ == nullptr) {
      status = Status::usage("the run in " + options_.run_dir +
                             " has checkpoints, and this start would not load them: turn checkpoints on");
    } else if (store_->generations().empty()) {
      status = {StatusCode::kNoCleanGeneration,
                "the run in " + options_.run_dir + " had checkpoints, and none is there any more"};
      coordinator_->restore_failed(status);
    }
    word = "restore";
  }
  if (Status s = agree_on_status(collective_, status); !s.ok()) return s;
  if (Status s = collective_.broadcast(&word); !s.ok()) return s;
  *restores = word == "restore";
  return Status();
}

Status StepGuard::Impl::still_held() const { return coordinator_ ? coordinator_->still_holds()() : Status(); }

// Collective.
Status StepGuard::Impl::restore() {
  RestoredGeneration from;
  const auto at_most = coordinator_ ? coordinator_->restore_at_most() : std::nullopt;
  // A run that was cut off, and wakes up, must not move what is another's by now.
  Status status = agree_on_status(collective_, still_held());
  if (status.ok()) status = store_->restore(&from, at_most);
  report_checkpoints();
  if (status.ok()) {
    Status mine = still_held();
    if (coordinator_ && mine.ok()) {
      const GenerationId id{from.position.epoch, from.position.attempt};
      mine = store_->set_aside_newer(id);
      if (mine.ok()) {
        mine = coordinator_->restored({id, from.manifest_sha256, from.position.update, from.position.skips,
                                       from.ranks, from.memory, from.refused});
      }
      tell_generations();
    }
    status = agree_on_status(collective_, mine);
  }
  if (!status.ok()) {
    if (coordinator_) coordinator_->restore_failed(status);
    return status;
  }
  restored_from_ = GenerationId{from.position.epoch, from.position.attempt}.name();
  saved_at_ = from.position.attempt;
  proof_wanted_ = true;
  applied_ = overflowed_ = false;
  log_.go_back();
  return take_position();
}

Decision StepGuard::Impl::roll_back() {
  const PausedWatchdog paused(watchdog_.get());
  closing_ = false;
  const Status status =
      store_ ? restore() : Status::usage("roll_back() without checkpoints: there is nothing to go back to");
  if (status.ok()) {
    // A restart must not feed again what was dropped.
    if (policy_.rollback_skips_data()) save_checkpoint();
    return {Action::kRollBack, StatusCode::kOk, "restored " + restored_from_};
  }
  Decision decision{Action::kAbort, status.code(), status.message()};
  decision.agreed = is_agreed(status.code());
  return decision;
}

void StepGuard::Impl::begin_sweep_if_due() {
  proves_ = false;
  if (!sweep_) return;
  const bool sweeps = due(attempt_, policy_.sweep_interval_attempts());
  if (!sweeps && !proof_wanted_ && !due(attempt_, policy_.proof_interval_attempts())) return;
  begin_sweep(sweeps ? StateSweep::Scope::kEverything : StateSweep::Scope::kReplicas);
}

void StepGuard::Impl::begin_sweep(StateSweep::Scope scope) {
  proof_wanted_ = false;
  sweep_->begin(scope);
}

// What was found was written by an update, as far as anybody knows.
void StepGuard::Impl::end_sweep() {
  if (!sweep_ || !sweep_->running()) return;
  StateSweep::Result result = sweep_->finish();
  for (const StateSweep::Found& found : result.non_finite) log_.add_written(found.tensor, found.probe, 0);
  log_.prove(group_coefficient_ * result.proof, result.digests);
  proves_ = true;
}

// Of ranks that are missing, or at another attempt, nothing is known.
void StepGuard::Impl::count_proof(const Verdict& verdict) {
  const bool of_all = verdict.kind != Verdict::Kind::kMissing && verdict.kind != Verdict::Kind::kDisagree;
  if (coordinator_ && proves_ && of_all && verdict.sum.replica_proof() == 0) {
    coordinator_->metrics().count_replica_proof();
  }
}

// What this rank has to tell of the attempt. Rank 0 knows the names of its own tensors only.
std::string StepGuard::Impl::report(const Verdict& verdict) const {
  const bool says_names = verdict.kind == Verdict::Kind::kDiverged && sweep_ && collective_.rank() != 0 &&
                          groups_.is_first(collective_.rank()) && replicas_.size() > 1;
  return says_names ? log_.report(verdict, sweep_->proven()) : log_.report(verdict);
}

bool StepGuard::Impl::checkpoint_due() const {
  return store_ && due(attempt_, options_.checkpoints.interval_attempts) && saved_at_ != attempt_;
}

// Local. A disk that is slower than the interval costs checkpoints, not attempts.
void StepGuard::Impl::save_checkpoint() {
  if (store_->in_flight()) {
    if (coordinator_) {
      coordinator_->checkpoint_done({{epoch_, attempt_},
                                     false,
                                     false,
                                     "",
                                     store_->flight().name() + ", which was begun before, is not on disk yet",
                                     0,
                                     0,
                                     {}});
    }
    return;
  }
  if (coordinator_ && scaler_) {
    const LossScaler::State& scale = scaler_->state();
    coordinator_->keep_loss_scale(scale.scale, scale.clean_updates, scale.overflows_to_halve);
  }
  store_->save({epoch_, attempt_, updates_, skips_}, coordinator_ ? coordinator_->lineage() : Bytes());
  saved_at_ = attempt_;
  flight_proven_ = false;
  proof_wanted_ = true;
}

void StepGuard::Impl::report_checkpoints() {
  if (!coordinator_ || !store_) return;
  for (CheckpointOutcome& outcome : store_->take_outcomes()) {
    std::erase(publishing_, outcome.id);
    coordinator_->checkpoint_done({outcome.id, outcome.published, outcome.non_finite,
                                   std::move(outcome.manifest_sha256), std::move(outcome.reason),
                                   outcome.bytes, outcome.seconds, std::move(outcome.removed)});
    tell_generations();
  }
}

Status StepGuard::Impl::complete_checkpoint() {
  // The watchdog pauses for this rank's own disk, and not for the others: who waits for them must be able to
  // find that they are gone.
  if (!store_->part_done()) {
    const PausedWatchdog paused(watchdog_.get());
    while (!store_->part_done()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  if (coordinator_) publishing_.push_back(store_->flight());
  return store_->complete();
}

// What is in flight and not proven is the state that this attempt began with.
void StepGuard::Impl::judge_checkpoint(const Verdict& verdict) {
  if (!store_->in_flight() || flight_proven_) return;
  if (verdict.kind == Verdict::Kind::kUpdateFailed) {
    store_->abandon("the update before it failed, or wrote something that is not finite");
  } else if (verdict.kind == Verdict::Kind::kDiverged) {
    store_->abandon("replicas do not agree on it");
  } else {
    flight_proven_ = proves_;
  }
  if (coordinator_) tell_generations();
}

// What is proven and only not on disk yet may be gone back to: that waits for it.
void StepGuard::Impl::tell_generations() {
  std::vector<GenerationId> generations = store_->generations();
  generations.insert(generations.end(), publishing_.begin(), publishing_.end());
  if (store_->in_flight() && flight_proven_) generations.push_back(store_->flight());
  coordinator_->set_generations(std::move(generations));
}

Status StepGuard::Impl::settle_checkpoint(const Decision& decision, const Verdict& verdict) {
  // A generation that is not the one to go back to would only be set aside, or make retention remove that
  // one.
  if (decision.rolls_back() && store_->in_flight() && decision.back_to != store_->flight()) {
    store_->abandon("the run goes back behind it");
  }
  const bool hurries = decision.ends_run() || decision.rolls_back();
  if (store_->in_flight() && flight_proven_ && (verdict.parts_done || hurries)) {
    if (Status s = complete_checkpoint(); !s.ok()) return s;
  }
  if (decision.action == Action::kStop) return leave_checkpoint();
  if (!decision.ends_run()) return Status();
  {
    const PausedWatchdog paused(watchdog_.get());
    const double most = policy_.evidence().deadline_seconds();
    if (store_->wait_for(std::chrono::milliseconds(static_cast<std::int64_t>(most * 1000)))) {
      report_checkpoints();
    } else {
      // Its destructor would wait for a disk that hangs, and the process is about to end.
      static_cast<void>(store_.release());
    }
  }
  // Whoever leaves first makes mpirun end the others.
  return agree_on_status(collective_, Status());
}

Status StepGuard::Impl::leave_checkpoint() {
  if (store_->in_flight() && store_->flight().attempt != attempt_) {
    if (!flight_proven_) store_->abandon("the run ended before replicas were proven to agree on it");
    if (flight_proven_) {
      if (Status s = complete_checkpoint(); !s.ok()) return s;
    }
  }
  if (saved_at_ != attempt_) save_checkpoint();
  if (store_->in_flight()) {
    bool agree = flight_proven_;
    if (!agree) {
      if (Status s = replicas_agree_now(&agree); !s.ok()) return s;
    }
    if (!agree) store_->abandon("replicas do not agree on the state that the run ended with");
    if (agree) {
      if (Status s = complete_checkpoint(); !s.ok()) return s;
    }
  }
  {
    const PausedWatchdog paused(watchdog_.get());
    store_->wait();
  }
  report_checkpoints();
  return agree_on_status(collective_, Status());
}

// Collective, outside of an attempt.
Status StepGuard::Impl::replicas_agree_now(bool* agree) {
  sweep_->begin(StateSweep::Scope::kReplicas);
  const std::uint64_t mine = sweep_->finish().proof;
  std::vector<Bytes> all;
  Bytes word(reinterpret_cast<const char*>(&mine), sizeof mine);
  if (Status s = collective_.gather(word, &all); !s.ok()) return s;
  if (coordinator_) {
    const auto is_its_firsts = [&](int r) {
      return all[static_cast<std::size_t>(r)] ==
             all[static_cast<std::size_t>(groups_.first(groups_.group_of(r)))];
    };
    word = std::ranges::all_of(std::views::iota(0, collective_.size()), is_its_firsts) ? "yes" : "no";
  }
  if (Status s = collective_.broadcast(&word); !s.ok()) return s;
  *agree = word == "yes";
  return Status();
}

}  // namespace holdfast
