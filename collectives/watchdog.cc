// A tick, and what the others say.
#include <algorithm>
#include <chrono>
#include <exception>

#include "byte_codec.h"
#include "watchdog_impl.h"

namespace holdfast {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kUnheardTime{5'000};    // overdue, and asked by nobody: leave alone
constexpr milliseconds kSuspendedTime{2'000};  // a tick that takes so much longer: this process was stopped
constexpr int kWakingTicks = 5;
constexpr milliseconds kRepeatTime{1'000};  // between two suspicions
constexpr milliseconds kReportTime{1'000};  // between two reports of where this rank is

constexpr std::size_t kMostText = 400;  // of what is told of a transport that failed

constexpr std::string_view kHurry = "hurry";  // payload of a suspicion that cannot wait

// Others' words, and a library's, are shown on a terminal.
std::string on_one_line(std::string_view of) {
  std::string text(of);
  std::ranges::replace_if(
      text, [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; }, ' ');
  return text;
}

std::string encode_answer(const Answer& answer) {
  return ByteWriter()
      .u64(answer.place.epoch)
      .u64(answer.place.attempt)
      .u32(answer.place.step)
      .u8(static_cast<std::uint8_t>(answer.place.phase))
      .u8(answer.paused ? 1 : 0)
      .u32(answer.deadlines_missed)
      .text(std::string_view(answer.lost).substr(0, kMostText))
      .u8(answer.trainer_knows ? 1 : 0)
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
  answer->lost = on_one_line(reader.text());
  answer->trainer_knows = reader.u8() != 0;
  return reader.done() && phase <= static_cast<std::uint8_t>(Phase::kUpdate);
}

}  // namespace

std::int64_t Watchdog::Impl::ticks(milliseconds time) const {
  return (time.count() + options_.tick.count() - 1) / options_.tick.count();
}

Answer Watchdog::Impl::answer() const {
  return {board_.place(), board_.paused(), static_cast<std::uint32_t>(clock_.stalled() / clock_.deadline()),
          lost_, group_failed_};
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
      leave(" was stopped for a while, and finds that others have left");
    }
  }
  if (options_.asked_to_end && options_.asked_to_end()) end_soon();
  look_at_transport();
  const bool overdue = clock_.overdue();
  const bool knows_nobody = dialers_.empty() && !lookout_;
  if (overdue && knows_nobody) leave_alone();
  const bool in_trouble = knows_nobody ? trainer_sits_in_lost_transport() && !board_.paused()
                                       : overdue || group_failed_ || !lost_.empty();
  if (in_trouble) {
    raise_suspicion();
  } else {
    since_suspicion_ = 0;
    unheard_ = 0;
  }
  // So that the last place of a rank that dies is known, to a second or so.
  if (++since_report_ % ticks(kReportTime) == 0) {
    for (const auto& dialer : dialers_) dialer->send(FrameType::kAnswer, encode_answer(answer()));
    if (self_.rank == 0 && options_.heard) options_.heard(reports());
  }
  if (!lookout_) {
    const bool deserted = !dialers_.empty() && goodbyes_ == 0 &&
                          std::ranges::none_of(dialers_, [](const auto& d) { return d->connected(); });
    deserted_ = deserted ? deserted_ + 1 : 0;
    if (deserted_ > ticks(kUnheardTime)) leave_alone();
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

void Watchdog::Impl::group_failed(const std::string& why) {
  {
    const std::lock_guard lock(mutex_);
    told_ = why;
  }
  group_failed_ = true;
}

// What the trainer knows it says itself; the rest is said here, once. The thread in the transport is not
// waited for: peers ask meanwhile.
void Watchdog::Impl::look_at_transport() {
  if (!lost_.empty()) return;
  const bool told = group_failed_;
  const std::string why = told ? what_was_told() : ask_transport();
  if (!told && why.empty()) return;
  lost_ = on_one_line(why.empty() ? "no reason given" : why);
  if (!told) say(": the transport failed: " + lost_);
  begin_abort();
}

std::string Watchdog::Impl::what_was_told() {
  const std::lock_guard lock(mutex_);
  return told_;
}

// "" for a transport that is well.
std::string Watchdog::Impl::ask_transport() const {
  if (!options_.health) return "";
  try {
    const Status health = options_.health();
    return health.ok() || !health.message().empty() ? health.message() : "no reason given";
  } catch (const std::exception& error) {
    return std::string("it cannot be asked how it is: ") + error.what();
  } catch (...) {
    return "it cannot be asked how it is";
  }
}

void Watchdog::Impl::raise_suspicion() {
  if (since_suspicion_++ % ticks(kRepeatTime) == 0) {
    for (const auto& dialer : dialers_) dialer->send(FrameType::kSuspect);
    if (lookout_) lookout_->suspect();
  }
  // Rank 0 and the deputy ask when they hear of it. Whoever they cannot hear is on its own.
  if (!lookout_ && ++unheard_ > ticks(kUnheardTime)) leave_alone();
}

// At once and in a hurry, and then again from time to time: somebody may have answered and stopped right
// after.
void Watchdog::Impl::end_soon() {
  const bool first = since_asked_to_end_ == 0;
  if (since_asked_to_end_++ % ticks(kRepeatTime) != 0) return;
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

}  // namespace holdfast
