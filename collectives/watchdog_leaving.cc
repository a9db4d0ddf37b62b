// The end of this process, and the end of the run.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <future>
#include <system_error>
#include <thread>

#include "watchdog_impl.h"

namespace holdfast {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kRecordTime{2'000};  // for a departure to be put on record
constexpr milliseconds kLetGoTime{2'000};   // for what is let go of before this process ends
constexpr milliseconds kFlushTime{500};     // for last words to go out

// On a thread of its own, since it may hang. Ready when it is done, or when no thread can be had.
std::future<void> call_aside(std::function<void()> work) {
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
    done->set_value();
  }
  return finished;
}

}  // namespace

void Watchdog::Impl::say(const std::string& line) const {
  const std::string text = "holdfast: rank " + std::to_string(self_.rank) + line + "\n";
  [[maybe_unused]] const auto written = write(STDERR_FILENO, text.data(), text.size());
}

void Watchdog::Impl::warn(const Answer& own) {
  say(": all ranks stand still at attempt " + std::to_string(own.place.attempt) + ", phase " +
      std::string(phase_name(own.place.phase)) + ", and nobody is missing; waiting");
}

void Watchdog::Impl::leave_together(const Departure& departure) {
  record(departure);
  listener_->send_all(FrameType::kLeave, departure.describe());
  flush(kFlushTime);
  leave(": " + departure.describe());
}

void Watchdog::Impl::leave_alone() {
  Departure departure;
  departure.reported_by = self_.rank;
  departure.alone = !dialers_.empty();
  departure.survivors.push_back({self_, board_.place()});
  const bool lost = !lost_.empty();
  if (lost) departure.transport_failure = "rank " + std::to_string(self_.rank) + ": " + lost_;
  record(departure);
  const double seconds = static_cast<double>((options_.tick * clock_.stalled()).count()) / 1000.0;
  char time[32];
  std::snprintf(time, sizeof(time), "%.1f s", seconds);
  const Place place = board_.place();
  std::string why = lost ? ". The transport failed: " + lost_ : std::string();
  if (departure.alone) why += ". Neither rank 0 nor its deputy can be reached";
  if (why.empty()) why = ". A rank is missing or stuck";
  leave(" (host " + self_.host + ", pid " + std::to_string(self_.pid) + ") made no progress for " + time +
        ": attempt " + std::to_string(place.attempt) + " of epoch " + std::to_string(place.epoch) +
        " stands at phase " + std::string(phase_name(place.phase)) + why);
}

// A file system may hang.
void Watchdog::Impl::record(const Departure& departure) {
  if (!options_.record) return;
  call_aside([record = options_.record, departure] { record(departure); }).wait_for(kRecordTime);
}

// Said first: letting go may end this process, too.
void Watchdog::Impl::leave(const std::string& line) {
  say(line + ". Leaving with exit code 84.");
  end_process();
}

void Watchdog::Impl::end_process() {
  const auto until = std::chrono::steady_clock::now() + kLetGoTime;
  begin_abort();
  std::future<void> let_go;
  if (options_.before_leaving) let_go = call_aside(options_.before_leaving);
  if (let_go.valid()) let_go.wait_until(until);
  if (aborted_) aborted_->wait_until(until);
  _exit(static_cast<int>(StatusCode::kRankMissing));
}

void Watchdog::Impl::begin_abort() {
  if (options_.abort && !aborted_) aborted_ = call_aside(options_.abort);
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

}  // namespace holdfast
