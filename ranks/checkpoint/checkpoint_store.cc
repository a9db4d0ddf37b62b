#include "holdfast/checkpoint/checkpoint_store.h"

#include <fmt/format.h>

#include <atomic>
#include <cassert>
#include <chrono>
#include <exception>

#include "declared_state.h"
#include "generation_folder.h"
#include "holdfast/coord/event_log.h"
#include "holdfast/coord/printable.h"
#include "holdfast/coord/storage/background_writer.h"
#include "holdfast/coord/storage/outcome_queue.h"
#include "holdfast/coord/storage/publication.h"
#include "part_reports.h"
#include "restore.h"
#include "shared_folder.h"
#include "snapshot.h"

namespace holdfast {
namespace {

using Clock = std::chrono::steady_clock;

// A part and the removal of one that was abandoned can wait behind a publication without holding up a step.
constexpr std::size_t kMostWaiting = 4;
// What a part may need beside its tensors' bytes, for its header and the manifest.
constexpr std::uint64_t kSpareBytes = 64 << 10;

// A generation on one rank, from save() to complete().
struct Flight {
  RunPosition position;
  Bytes memory;
  std::string time;
  Clock::time_point begun;
  std::atomic<bool> abandoned{false};
  std::atomic<bool> done{false};
  PartReport report;  // the writer's, until `done`

  GenerationId id() const { return {position.epoch, position.attempt}; }
  double seconds() const { return std::chrono::duration<double>(Clock::now() - begun).count(); }
};

void fail(PartReport* report, const std::string& why, bool non_finite) {
  report->clear_parts();
  report->set_failure(why);
  report->set_non_finite(non_finite);
}

// The same on every rank, and a user's to mend.
Status as_usage(const Status& status) { return status.ok() ? status : Status::usage(status.message()); }

}  // namespace

class CheckpointStore::Impl {
 public:
  Impl(Collective& collective, FileSystem& files, const std::string& path, const CheckpointOptions& options,
       const TrainingState& state, const ReplicaGroups& groups)
      : collective_(collective),
        files_(files),
        state_(state),
        groups_(groups),
        group_(groups.only_one() ? -1 : groups.group_of(collective.rank())),
        folder_(files, path, options),
        snapshot_(state, groups.is_first(collective.rank())) {}

  Status open();
  void save(const RunPosition& position, const Bytes& memory);
  Status complete();
  void abandon(const std::string& why);
  Status restore(RestoredGeneration* out, const std::optional<GenerationId>& at_most);
  Status set_aside_newer(const GenerationId& newest);

  const Flight* flight() const { return flight_.get(); }
  std::vector<CheckpointOutcome> take_outcomes() { return outcomes_.take(); }
  std::vector<GenerationId> generations() const;
  void wait() { writer_.wait(); }
  bool wait_for(std::chrono::milliseconds most) { return writer_.wait_for(most); }

 private:
  bool is_rank_0() const { return collective_.rank() == 0; }

  // On the writer's thread.
  void write(Flight& flight);
  Status write_parts(PartReport* report, const std::string& name, std::optional<NonFinite>* finding);
  Status check_space() const;
  void publish(const Flight& flight, const std::vector<Bytes>& reports);

  Collective& collective_;
  FileSystem& files_;
  const TrainingState& state_;
  const ReplicaGroups groups_;
  const int group_;          // of this rank; -1 when there is only one
  GenerationFolder folder_;  // changed on rank 0 only, by the writer's thread or when that is idle
  DeclaredState declared_;   // constant after open()
  RanksState ranks_;         // constant after open()
  Snapshot snapshot_;        // the writer's while the flight is not done
  std::shared_ptr<Flight> flight_;
  std::shared_ptr<Flight> abandoned_;  // the last one; its part may still be being written

  OutcomeQueue<CheckpointOutcome> outcomes_{kMostWaiting + 1};

  BackgroundWriter writer_{kMostWaiting};  // last: its jobs use all of the above
};

Status CheckpointStore::Impl::open() {
  if (Status s = agree_on_status(collective_, as_usage(is_rank_0() ? folder_.open() : Status())); !s.ok())
    return s;
  if (Status s = agree_that_all_see(collective_, files_, folder_.path()); !s.ok()) return s;
  if (Status s = agree_on_status(collective_, declare(state_, &declared_)); !s.ok()) return s;
  return agree_on_state(collective_, groups_, declared_, &ranks_);
}

void CheckpointStore::Impl::save(const RunPosition& position, const Bytes& memory) {
  assert(!flight_);
  if (abandoned_ && !abandoned_->done) writer_.wait();  // it reads the snapshot
  abandoned_.reset();
  flight_ = std::make_shared<Flight>();
  flight_->position = position;
  flight_->memory = memory;
  flight_->time = utc_time();
  flight_->begun = Clock::now();
  PartReport& report = flight_->report;
  report.set_rank(collective_.rank());
  report.set_epoch(position.epoch);
  report.set_attempt(position.attempt);
  if (!snapshot_.has_replicated() && !snapshot_.has_own()) {
    flight_->done = true;
    return;
  }
  if (Status s = snapshot_.take(); !s.ok()) {
    fail(&report, s.message(), false);
    flight_->done = true;
    return;
  }
  writer_.submit([this, flight = flight_] { write(*flight); });
}

void CheckpointStore::Impl::write(Flight& flight) {
  if (!flight.abandoned) {
    std::optional<NonFinite> finding;
    Status written;
    try {
      written = write_parts(&flight.report, flight.id().name(), &finding);
    } catch (const std::exception& e) {
      written = Status::internal(printable(e.what()));
    }
    if (!written.ok())
      fail(&flight.report, finding ? finding->to_string() : written.message(), finding.has_value());
  }
  flight.done = true;
}

Status CheckpointStore::Impl::write_parts(PartReport* report, const std::string& name,
                                          std::optional<NonFinite>* finding) {
  if (Status s = check_space(); !s.ok()) return s;
  if (Status s = begin_publication(files_, folder_.path(), name); !s.ok()) return s;
  const std::string partial = partial_path(folder_.path(), name);
  if (snapshot_.has_replicated()) {
    if (Status s =
            write_part(files_, partial, -1, snapshot_.replicated(), report->add_parts(), finding, group_);
        !s.ok())
      return s;
  }
  if (!snapshot_.has_own()) return Status();
  return write_part(files_, partial, collective_.rank(), snapshot_.own(), report->add_parts(), finding,
                    group_);
}

// A disk that has no room is not filled first. The others write at the same time, so it may still become
// full.
Status CheckpointStore::Impl::check_space() const {
  std::uint64_t free = 0;
  const std::uint64_t needed = snapshot_.bytes() + kSpareBytes;
  if (!files_.free_bytes(folder_.path(), &free).ok() || free >= needed) return Status();
  return Status::internal(fmt::format("no space in {}: about {} bytes are needed and {} are free",
                                      printable(folder_.path()), needed, free));
}

Status CheckpointStore::Impl::complete() {
  assert(flight_);
  const std::shared_ptr<Flight> flight = std::move(flight_);
  flight_.reset();
  if (!flight->done) writer_.wait();
  const bool silent = !flight->report.has_failure() && flight->report.parts_size() == 0;
  std::vector<Bytes> reports;
  if (Status s = collective_.gather(silent ? Bytes() : flight->report.SerializeAsString(), &reports); !s.ok())
    return s;
  if (is_rank_0()) {
    writer_.submit([this, flight, all = std::move(reports)] { publish(*flight, all); });
  }
  return Status();
}

void CheckpointStore::Impl::publish(const Flight& flight, const std::vector<Bytes>& reports) {
  CheckpointOutcome outcome;
  outcome.id = flight.id();
  try {
    Manifest manifest;
    manifest.set_epoch(flight.position.epoch);
    manifest.set_attempt(flight.position.attempt);
    manifest.set_update(flight.position.update);
    manifest.set_skips(flight.position.skips);
    manifest.set_ranks(static_cast<std::uint32_t>(collective_.size()));
    manifest.set_time(flight.time);
    manifest.set_memory(flight.memory);
    manifest.set_version(HOLDFAST_VERSION);
    const Refusal refusal = assemble(reports, ranks_, outcome.id, &manifest);
    if (refusal.reason.empty()) {
      folder_.publish(manifest, &outcome);
    } else {
      outcome.non_finite = refusal.non_finite;
      outcome.reason = outcome.id.name() + " refused: " + refusal.reason;
      folder_.discard(outcome.id);
    }
  } catch (const std::exception& e) {
    outcome.reason += outcome.id.name() + ": " + printable(e.what());
  }
  outcome.seconds = flight.seconds();
  outcomes_.put(std::move(outcome));
}

void CheckpointStore::Impl::abandon(const std::string& why) {
  if (!flight_) return;
  abandoned_ = std::move(flight_);
  flight_.reset();
  abandoned_->abandoned = true;
  if (!is_rank_0()) return;
  CheckpointOutcome outcome;
  outcome.id = abandoned_->id();
  outcome.reason = outcome.id.name() + " abandoned: " + why;
  writer_.submit([this, flight = abandoned_, abandoned = std::move(outcome)]() mutable {
    folder_.discard(abandoned.id);
    abandoned.seconds = flight->seconds();
    outcomes_.put(std::move(abandoned));
  });
}

Status CheckpointStore::Impl::restore(RestoredGeneration* out, const std::optional<GenerationId>& at_most) {
  abandon("the run is restored from an older one");
  writer_.wait();
  return restore_newest({collective_, files_, folder_, state_, declared_, ranks_, groups_}, at_most, out);
}

Status CheckpointStore::Impl::set_aside_newer(const GenerationId& newest) {
  if (!is_rank_0()) return Status();
  writer_.wait();
  Status first;
  for (const StoredGeneration& stored : folder_.stored()) {
    std::string as;
    if (stored.id <= newest) continue;
    Status moved = folder_.set_aside(stored.id, &as);
    if (first.ok()) first = std::move(moved);
  }
  return first;
}

std::vector<GenerationId> CheckpointStore::Impl::generations() const {
  std::vector<GenerationId> ids;
  for (const StoredGeneration& stored : folder_.stored()) ids.push_back(stored.id);
  return ids;
}

// ---- the public face

CheckpointStore::CheckpointStore(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
CheckpointStore::~CheckpointStore() = default;

Status CheckpointStore::create(Collective& collective, FileSystem& files, const std::string& checkpoints,
                               const CheckpointOptions& options, const TrainingState& state,
                               std::unique_ptr<CheckpointStore>* out) {
  return create(collective, files, checkpoints, options, state, ReplicaGroups(collective.size()), out);
}

Status CheckpointStore::create(Collective& collective, FileSystem& files, const std::string& checkpoints,
                               const CheckpointOptions& options, const TrainingState& state,
                               const ReplicaGroups& groups, std::unique_ptr<CheckpointStore>* out) {
  Status mine = as_usage(state.check());
  if (collective.rank() == 0 && mine.ok()) {
    if (options.keep == 0) mine = Status::usage("checkpoints: keep must be at least 1");
    if (checkpoints.empty()) mine = Status::usage("checkpoints: no folder is given");
  }
  if (Status s = agree_on_status(collective, mine); !s.ok()) return s;
  Bytes path = checkpoints;
  if (Status s = collective.broadcast(&path); !s.ok()) return s;
  auto impl = std::make_unique<Impl>(collective, files, path, options, state, groups);
  if (Status s = impl->open(); !s.ok()) return s;
  out->reset(new CheckpointStore(std::move(impl)));
  return Status();
}

void CheckpointStore::save(const RunPosition& position, const Bytes& memory) {
  impl_->save(position, memory);
}
bool CheckpointStore::in_flight() const { return impl_->flight() != nullptr; }
GenerationId CheckpointStore::flight() const { return in_flight() ? impl_->flight()->id() : GenerationId(); }
bool CheckpointStore::part_done() const { return in_flight() && impl_->flight()->done; }
Status CheckpointStore::complete() { return impl_->complete(); }
void CheckpointStore::abandon(const std::string& why) { impl_->abandon(why); }
std::vector<CheckpointOutcome> CheckpointStore::take_outcomes() { return impl_->take_outcomes(); }
void CheckpointStore::wait() { impl_->wait(); }
bool CheckpointStore::wait_for(std::chrono::milliseconds most) { return impl_->wait_for(most); }
Status CheckpointStore::restore(RestoredGeneration* out, const std::optional<GenerationId>& at_most) {
  return impl_->restore(out, at_most);
}
Status CheckpointStore::set_aside_newer(const GenerationId& newest) { return impl_->set_aside_newer(newest); }
std::vector<GenerationId> CheckpointStore::generations() const { return impl_->generations(); }

}  // namespace holdfast
