// How the watchdogs of a job are connected, and what callers see of one.
#include <unistd.h>

#include <algorithm>
#include <set>

#include "byte_codec.h"
#include "handshake.h"
#include "watchdog_impl.h"

namespace holdfast {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kConnectTime{15'000};  // for all ranks to be connected
constexpr milliseconds kAnswerTime{1'000};
constexpr milliseconds kAbortTime{10'000};  // for an abort that takes two seconds, on a machine that is busy
constexpr milliseconds kGraceTime{4'000};   // more than a guard waits after a collective that failed
constexpr milliseconds kHurriedTime{400};   // the same within the second between mpirun's SIGTERM and SIGKILL
constexpr milliseconds kDeathTime{300};     // a second before mpirun's SIGTERM

RankIdentity identity(int rank) {
  char host[256] = "?";
  gethostname(host, sizeof(host) - 1);
  return {rank, host, getpid()};
}

}  // namespace

struct Watchdog::Impl::Team {
  std::string token;
  int deputy = 1;
  bool one_host = true;
  std::vector<std::string> endpoints[2];  // of rank 0 and of the deputy
};

bool Watchdog::Impl::is_server(const Team& team) const {
  return self_.rank == 0 || self_.rank == team.deputy;
}

Watchdog::Impl::Impl(int rank, const Options& options)
    : self_(identity(rank)),
      options_(options),
      clock_(options.deadline.count() > 0 ? ticks(options.deadline) : 0, ticks(options.floor)),
      keep_running_(io_.get_executor()) {}

Watchdog::Impl::~Impl() {
  stop_ = true;
  io_.stop();
  if (thread_.joinable()) thread_.join();
  for (const auto& dialer : dialers_) dialer->stop();
  if (aborted_) aborted_->wait_for(kAbortTime);
}

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
  options.answer_ticks = ticks(kAnswerTime);
  options.hurried_ticks = ticks(kHurriedTime);
  options.death_ticks = ticks(kDeathTime);
  options.lost_ticks = ticks(kGraceTime);
  if (self_.rank == team.deputy) {
    options.defers_to = 0;
    options.answer_ticks += ticks(kDeathTime);
  }
  lookout_.emplace(self_, listener_->joined(), options);
}

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
void Watchdog::group_failed(const std::string& why) { impl_->group_failed(why); }

}  // namespace holdfast
