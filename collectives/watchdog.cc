#include "holdfast/collectives/watchdog.h"

#include <unistd.h>

#include <algorithm>
#include <asio.hpp>
#include <atomic>
#include <cstdio>
#include <future>
#include <optional>
#include <set>
#include <system_error>
#include <thread>

#include "byte_codec.h"
#include "handshake.h"
#include "lookout.h"
#include "side_channel.h"
#include "stall_clock.h"

namespace holdfast {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kConnectTime{15'000};  // for all ranks to be connected
constexpr milliseconds kRecordTime{2'000};    // for a departure to be put on record
constexpr milliseconds kLetGoTime{2'000};     // for what is let go of before this process ends
constexpr milliseconds kFlushTime{500};       // for last words to go out
constexpr milliseconds kAnswerTime{1'000};
constexpr milliseconds kHurriedTime{400};  // the same within the second between mpirun's SIGTERM and SIGKILL
constexpr milliseconds kDeathTime{300};    // a second before mpirun's SIGTERM
constexpr milliseconds kUnheardTime{5'000};    // overdue, and asked by nobody: leave alone
constexpr milliseconds kSuspendedTime{2'000};  // a tick that takes so much longer: this process was stopped
constexpr int kWakingTicks = 5;
constexpr milliseconds kRepeatTime{1'000};  // between two suspicions
constexpr milliseconds kReportTime{1'000};  // between two reports of where this rank is

constexpr std::string_view kHurry = "hurry";  // payload of a suspicion that cannot wait

std::int64_t ticks(milliseconds time, milliseconds tick) {
  return (time.count() + tick.count() - 1) / tick.count();  // rounded up
}

std::string encode_answer(const Answer& answer) {
  return ByteWriter()
      .u64(answer.place.epoch)
      .u64(answer.place.attempt)
      .u32(answer.place.step)
      .u8(static_cast<std::uint8_t>(answer.place.phase))
      .u8(answer.paused ? 1 : 0)
      .u32(answer.deadlines_missed)
      .take();
}

bool decode_answer(std::string_view bytes, Answer* answer) {
  ByteReader reader(bytes);
  answer->place.epoch = reader.u64();
  answer->place.attempt = reader.u64();
  answer->place.step = reader.u32();
  const std::uint8_t phase = reader.u8();
  answer->place.phase = static_cast<Phase>(phase);
  answer->paused = reader.u8() != 0;
  answer->deadlines_missed = reader.u32();
  return reader.done() && phase <= static_cast<std::uint8_t>(Phase::kUpdate);
}

RankIdentity identity(int rank) {
  char host[256] = "?";
  gethostname(host, sizeof(host) - 1);
  return {rank, host, getpid()};
}

// On a thread of its own, since it may hang; this one does not wait for it for ever.
void call_within(milliseconds time, std::function<void()> work) {
  auto done = std::make_shared<std::promise<void>>();
  auto finished = done->get_future();
  try {
    std::thread([done, work = std::move(work)] {
      try {
        work();
      } catch (...) {  // must not keep this process from leaving with its exit code
      }
      done->set_value();
    }).detach();
  } catch (const std::system_error&) {
    return;  // no thread can be had
  }
  finished.wait_for(time);
}

void say_leaving(const std::string& line) {
  const std::string text = "holdfast: " + line + ". Leaving with exit code 84.\n";
  [[maybe_unused]] const auto written = write(STDERR_FILENO, text.data(), text.size());
}

// What every rank is told at the start.
struct Team {
  std::string token;
  int deputy = 1;
  bool one_host = true;
  std::vector<std::string> endpoints[2];  // of rank 0 and of the deputy
};

}  // namespace

class Watchdog::Impl {
 public:
  Impl(int rank, const Options& options)
      : self_(identity(rank)),
        options_(options),
        clock_(options.deadline.count() > 0 ? ticks(options.deadline, options.tick) : 0,
               ticks(options.floor, options.tick)),
        keep_running_(io_.get_executor()) {}

  ~Impl() {
    stop_ = true;
    io_.stop();
    if (thread_.joinable()) thread_.join();
    for (const auto& dialer : dialers_) dialer->stop();
  }

  Status join(Collective& collective);
  void start() {
    thread_ = std::thread([this] { watch(); });
  }

  ProgressBoard board_;
  std::atomic<bool> group_failed_{false};

 private:
  bool is_server(const Team& team) const { return self_.rank == 0 || self_.rank == team.deputy; }
  Status listen(const Team& team, int world_size);
  Status connect(const Team& team, int world_size);
  void watch_out(const Team& team);
  void watch();
  void on_tick();
  void raise_suspicion();
  void end_soon();
  Answer answer() const;
  std::vector<RankReport> reports() const;
  void on_server_frame(FrameType type, Dialer& from);
  void on_client_frame(int rank, FrameType type, std::string_view payload);
  void warn(const Answer& own);
  [[noreturn]] void leave(const std::string& line);
  [[noreturn]] void end_process();
  [[noreturn]] void leave_together(const Departure& departure);
  [[noreturn]] void leave_alone();
  void record(const Departure& departure);
  void say_goodbye();
  void flush(milliseconds time);
  bool flushed() const;

  const RankIdentity self_;
  const Options options_;

  // All below belong to the watchdog's thread once it runs, and to the creating thread before.
  StallClock clock_;
  asio::io_context io_;
  asio::executor_work_guard<asio::io_context::executor_type> keep_running_;
  std::unique_ptr<Listener> listener_;            // on rank 0 and on the deputy
  std::vector<std::shared_ptr<Dialer>> dialers_;  // to rank 0 and to the deputy
  std::size_t goodbyes_ = 0;                      // of those two
  std::optional<Lookout> lookout_;                // on rank 0 and on the deputy
  std::int64_t since_asked_to_end_ = 0;           // ticks
  int just_woken_ = 0;                // ticks left in which a closed connection is this rank's own fault
  std::int64_t since_suspicion_ = 0;  // ticks
  std::int64_t since_report_ = 0;     // ticks
  std::int64_t unheard_ = 0;          // ticks that this rank was overdue and asked by nobody
  std::int64_t deserted_ = 0;         // ticks that this rank was connected to neither

  std::atomic<bool> stop_{false};
  std::thread thread_;
};

// ---- start

Status Watchdog::Impl::join(Collective& collective) {
  // Who is where goes to rank 0, which names the deputy: the first rank on another host, else rank 1.
  Team team;
  std::vector<Bytes> hosts;
  if (Status s = collective.gather(self_.host, &hosts); !s.ok()) return s;
  Status mine;
  if (collective.rank() == 0) {
    mine = random_secret(&team.token);
    for (std::size_t r = hosts.size(); r-- > 1;) {
      if (hosts[r] == hosts[0]) continue;
      team.deputy = static_cast<int>(r);
      team.one_host = false;
    }
  }
  Bytes told = ByteWriter()
                   .raw(team.token)
                   .u32(static_cast<std::uint32_t>(team.deputy))
                   .u8(team.one_host ? 1 : 0)
                   .take();
  if (Status s = agree_on_status(collective, mine); !s.ok()) return s;
  if (Status s = collective.broadcast(&told); !s.ok()) return s;
  ByteReader reader(told);
  team.token = std::string(reader.raw(kSecretBytes));
  team.deputy = static_cast<int>(reader.u32());
  team.one_host = reader.u8() != 0;

  // The two that listen say where, to rank 0, which tells everybody.
  if (is_server(team)) mine = listen(team, collective.size());
  if (Status s = agree_on_status(collective, mine); !s.ok()) return s;
  ByteWriter where;
  if (listener_) {
    for (const std::string& endpoint : listener_->endpoints()) where.text(endpoint);
  }
  std::vector<Bytes> all;
  if (Status s = collective.gather(where.take(), &all); !s.ok()) return s;
  told.clear();
  if (collective.rank() == 0) {
    told = ByteWriter().text(all[0]).text(all[static_cast<std::size_t>(team.deputy)]).take();
  }
  if (Status s = collective.broadcast(&told); !s.ok()) return s;
  ByteReader places(told);
  for (auto& endpoints : team.endpoints) {
    ByteReader list(places.text());
    while (list.ok() && !list.done()) endpoints.emplace_back(list.text());
  }

  mine = connect(team, collective.size());
  if (Status s = agree_on_status(collective, mine); !s.ok()) return s;
  if (is_server(team)) watch_out(team);
  return Status();
}

Status Watchdog::Impl::listen(const Team& team, int world_size) {
  std::set<int> expected;
  for (int r = 0; r < world_size; ++r) {
    if (r != self_.rank) expected.insert(r);
  }
  Listener::Handlers handlers;
  handlers.on_joined = [](const RankIdentity&) {};
  handlers.on_frame = [this](int rank, FrameType type, std::string_view payload) {
    on_client_frame(rank, type, payload);
  };
  handlers.on_closed = [this](int rank) {
    if (lookout_) lookout_->closed(rank);
  };
  listener_ = std::make_unique<Listener>(io_, team.token, std::move(expected), std::move(handlers));
  return listener_->listen(addresses_to_bind(team.one_host));
}

// Runs the event loop here, before the thread is started, until everybody is connected.
Status Watchdog::Impl::connect(const Team& team, int world_size) {
  const int servers[2] = {0, team.deputy};
  for (int i = 0; i < 2; ++i) {
    if (servers[i] == self_.rank) continue;
    Dialer::Handlers handlers;
    auto slot = std::make_shared<std::weak_ptr<Dialer>>();
    handlers.on_joined = [] {};
    handlers.on_frame = [this, slot](FrameType type, std::string_view) {
      if (const auto dialer = slot->lock()) on_server_frame(type, *dialer);
    };
    handlers.on_closed = [] {};  // seen at the next tick
    dialers_.push_back(
        std::make_shared<Dialer>(io_, team.token, self_, team.endpoints[i], std::move(handlers)));
    *slot = dialers_.back();
    dialers_.back()->start();
  }
  const auto connected = [&] {
    return (!listener_ || listener_->complete()) &&
           std::ranges::all_of(dialers_, [](const auto& dialer) { return dialer->joined(); });
  };
  const auto until = std::chrono::steady_clock::now() + kConnectTime;
  while (!connected() && std::chrono::steady_clock::now() < until) io_.run_one_for(milliseconds(50));
  if (connected()) return Status();
  for (const auto& dialer : dialers_) dialer->stop();
  const std::size_t missing =
      listener_ ? static_cast<std::size_t>(world_size) - 1 - listener_->joined().size() : 0;
  return Status::usage(
      "the watchdogs' side channel could not be connected within 15 s" +
      (missing > 0 ? " (" + std::to_string(missing) + " ranks did not arrive)" : std::string()) +
      ": is TCP between the hosts blocked? `side_channel: false` in the policy does without it");
}

void Watchdog::Impl::watch_out(const Team& team) {
  Lookout::Options options;
  options.answer_ticks = ticks(kAnswerTime, options_.tick);
  options.hurried_ticks = ticks(kHurriedTime, options_.tick);
  options.death_ticks = ticks(kDeathTime, options_.tick);
  if (self_.rank == team.deputy) {
    options.defers_to = 0;
    options.answer_ticks += ticks(kDeathTime, options_.tick);
  }
  lookout_.emplace(self_, listener_->joined(), options);
}

// ---- watching

Answer Watchdog::Impl::answer() const {
  return {board_.place(), board_.paused(), static_cast<std::uint32_t>(clock_.stalled() / clock_.deadline())};
}

void Watchdog::Impl::watch() {
  while (!stop_) {
    const auto before = std::chrono::steady_clock::now();
    io_.run_for(options_.tick);
    if (std::chrono::steady_clock::now() - before > options_.tick + kSuspendedTime)
      just_woken_ = kWakingTicks;
    if (!stop_) on_tick();
  }
  say_goodbye();
}

void Watchdog::Impl::on_tick() {
  clock_.tick(board_.beats(), board_.place().attempt, board_.paused());
  if (just_woken_ > 0) {
    --just_woken_;
    if (lookout_ && lookout_->someone_closed()) {
      leave("rank " + std::to_string(self_.rank) +
            " was stopped for a while, and finds that others have left");
    }
  }
  if (options_.asked_to_end && options_.asked_to_end()) end_soon();
  const bool overdue = clock_.overdue();
  if (overdue && dialers_.empty() && !lookout_) leave_alone();
  if (overdue || group_failed_) {
    raise_suspicion();
  } else {
    since_suspicion_ = 0;
    unheard_ = 0;
  }
  // So that the last place of a rank that dies is known, to a second or so.
  if (++since_report_ % ticks(kReportTime, options_.tick) == 0) {
    for (const auto& dialer : dialers_) dialer->send(FrameType::kAnswer, encode_answer(answer()));
    if (self_.rank == 0 && options_.heard) options_.heard(reports());
  }
  if (!lookout_) {
    const bool deserted = !dialers_.empty() && goodbyes_ == 0 &&
                          std::ranges::none_of(dialers_, [](const auto& d) { return d->connected(); });
    deserted_ = deserted ? deserted_ + 1 : 0;
    if (deserted_ > ticks(kUnheardTime, options_.tick)) leave_alone();
    return;
  }
  const Answer own = answer();
  switch (lookout_->tick(own)) {
    case Lookout::Move::kNothing: break;
    case Lookout::Move::kAsk: listener_->send_all(FrameType::kAsk); break;
    case Lookout::Move::kWarn: warn(own); break;
    case Lookout::Move::kLeave: leave_together(lookout_->departure());
  }
}

std::vector<RankReport> Watchdog::Impl::reports() const {
  std::vector<RankReport> all = {{self_, board_.place(), 0}};
  if (!lookout_) return all;
  const double tick_seconds = std::chrono::duration<double>(options_.tick).count();
  lookout_->each_peer(
      [&](const RankIdentity& who, const std::optional<Place>& place, std::int64_t ticks_ago) {
        all.push_back({who, place, static_cast<double>(ticks_ago) * tick_seconds});
      });
  return all;
}

void Watchdog::Impl::raise_suspicion() {
  if (since_suspicion_++ % ticks(kRepeatTime, options_.tick) == 0) {
    for (const auto& dialer : dialers_) dialer->send(FrameType::kSuspect);
    if (lookout_) lookout_->suspect();
  }
  // Rank 0 and the deputy ask when they hear of it. Whoever they cannot hear is on its own.
  if (!lookout_ && ++unheard_ > ticks(kUnheardTime, options_.tick)) leave_alone();
}

// At once and in a hurry, and then again from time to time: somebody may have answered and stopped right
// after.
void Watchdog::Impl::end_soon() {
  const bool first = since_asked_to_end_ == 0;
  if (since_asked_to_end_++ % ticks(kRepeatTime, options_.tick) != 0) return;
  for (const auto& dialer : dialers_) dialer->send(FrameType::kSuspect, first ? kHurry : "");
  if (lookout_) first ? lookout_->hurry() : lookout_->suspect();
}

void Watchdog::Impl::on_server_frame(FrameType type, Dialer& from) {
  switch (type) {
    case FrameType::kAsk:
      unheard_ = 0;
      from.send(FrameType::kAnswer, encode_answer(answer()));
      break;
    case FrameType::kLeave:
      // Said once for all by the rank that found out.
      end_process();
    case FrameType::kGoodbye: ++goodbyes_; break;
    default: break;
  }
}

void Watchdog::Impl::on_client_frame(int rank, FrameType type, std::string_view payload) {
  if (!lookout_) return;
  Answer heard;
  switch (type) {
    case FrameType::kSuspect: payload == kHurry ? lookout_->hurry() : lookout_->suspect(); break;
    case FrameType::kAnswer:
      if (decode_answer(payload, &heard)) lookout_->answered(rank, heard);
      break;
    case FrameType::kGoodbye: lookout_->goodbye(rank); break;
    default: break;
  }
}

// ---- leaving

void Watchdog::Impl::warn(const Answer& own) {
  const std::string text = "holdfast: rank " + std::to_string(self_.rank) +
                           ": all ranks stand still at attempt " + std::to_string(own.place.attempt) +
                           ", phase " + std::string(phase_name(own.place.phase)) +
                           ", and nobody is missing; waiting\n";
  [[maybe_unused]] const auto written = write(STDERR_FILENO, text.data(), text.size());
}

void Watchdog::Impl::leave_together(const Departure& departure) {
  record(departure);
  listener_->send_all(FrameType::kLeave, departure.describe());
  flush(kFlushTime);
  leave("rank " + std::to_string(self_.rank) + ": " + departure.describe());
}

void Watchdog::Impl::leave_alone() {
  Departure departure;
  departure.reported_by = self_.rank;
  departure.alone = !dialers_.empty();
  departure.survivors.push_back({self_, board_.place()});
  record(departure);
  const double seconds = static_cast<double>((options_.tick * clock_.stalled()).count()) / 1000.0;
  char time[32];
  std::snprintf(time, sizeof(time), "%.1f s", seconds);
  const Place place = board_.place();
  leave(
      "rank " + std::to_string(self_.rank) + " (host " + self_.host + ", pid " + std::to_string(self_.pid) +
      ") made no progress for " + time + ": attempt " + std::to_string(place.attempt) + " of epoch " +
      std::to_string(place.epoch) + " stands at phase " + std::string(phase_name(place.phase)) +
      (departure.alone ? ". Neither rank 0 nor its deputy can be reached" : ". A rank is missing or stuck"));
}

// A file system may hang.
void Watchdog::Impl::record(const Departure& departure) {
  if (!options_.record) return;
  call_within(kRecordTime, [record = options_.record, departure] { record(departure); });
}

// Said first: letting go may end this process, too.
void Watchdog::Impl::leave(const std::string& line) {
  say_leaving(line);
  end_process();
}

void Watchdog::Impl::end_process() {
  if (options_.before_leaving) call_within(kLetGoTime, options_.before_leaving);
  _exit(static_cast<int>(StatusCode::kRankMissing));
}

bool Watchdog::Impl::flushed() const {
  return (!listener_ || listener_->flushed()) &&
         std::ranges::all_of(dialers_, [](const auto& dialer) { return dialer->flushed(); });
}

void Watchdog::Impl::flush(milliseconds time) {
  const auto until = std::chrono::steady_clock::now() + time;
  while (!flushed() && std::chrono::steady_clock::now() < until) io_.run_one_for(milliseconds(20));
}

void Watchdog::Impl::say_goodbye() {
  lookout_.reset();
  io_.restart();
  for (const auto& dialer : dialers_) dialer->send(FrameType::kGoodbye);
  if (listener_) listener_->send_all(FrameType::kGoodbye);
  flush(kFlushTime);
  for (const auto& dialer : dialers_) dialer->stop();
  listener_.reset();
}

// ---- Watchdog

Status Watchdog::create(Collective& collective, const Options& options, std::unique_ptr<Watchdog>* out) {
  auto impl = std::make_unique<Impl>(collective.rank(), options);
  if (options.side_channel && collective.size() > 1) {
    if (Status s = impl->join(collective); !s.ok()) return s;
  }
  impl->start();
  out->reset(new Watchdog(std::move(impl)));
  return Status();
}

Watchdog::Watchdog(int rank, const Options& options) : impl_(std::make_unique<Impl>(rank, options)) {
  impl_->start();
}

Watchdog::Watchdog(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Watchdog::~Watchdog() = default;

ProgressBoard& Watchdog::board() { return impl_->board_; }
void Watchdog::group_failed() { impl_->group_failed_ = true; }

}  // namespace holdfast
