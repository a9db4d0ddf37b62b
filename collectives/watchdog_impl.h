// What is behind a Watchdog.
//
//   watchdog_start.cc    how the watchdogs of a job are connected
//   watchdog.cc          a tick, and what the others say
//   watchdog_leaving.cc  the end of the process, and the end of the run
#pragma once

#include <asio.hpp>
#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "holdfast/collectives/watchdog.h"
#include "lookout.h"
#include "side_channel.h"
#include "stall_clock.h"

namespace holdfast {

class Watchdog::Impl {
 public:
  Impl(int rank, const Options& options);
  ~Impl();
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  Status join(Collective& collective);  // collective: connects the watchdogs
  void start() {
    thread_ = std::thread([this] { watch(); });
  }

  void group_failed(const std::string& why);  // any thread

  ProgressBoard board_;

 private:
  struct Team;  // what every rank is told at the start

  bool is_server(const Team& team) const;
  Status listen(const Team& team, int world_size);
  Status connect(const Team& team, int world_size);
  void watch_out(const Team& team);
  void watch();
  void on_tick();
  void look_at_transport();
  std::string what_was_told();
  std::string ask_transport() const;
  bool trainer_sits_in_lost_transport() const { return !lost_.empty() && !group_failed_; }
  void raise_suspicion();
  void end_soon();
  Answer answer() const;
  std::vector<RankReport> reports() const;
  void on_server_frame(FrameType type, Dialer& from);
  void on_client_frame(int rank, FrameType type, std::string_view payload);
  void say(const std::string& line) const;  // on stderr, behind "holdfast: rank 3"
  void warn(const Answer& own);
  [[noreturn]] void leave(const std::string& line);
  [[noreturn]] void end_process();
  void begin_abort();
  [[noreturn]] void leave_together(const Departure& departure);
  [[noreturn]] void leave_alone();
  void record(const Departure& departure);
  void say_goodbye();
  void flush(std::chrono::milliseconds time);
  bool flushed() const;
  std::int64_t ticks(std::chrono::milliseconds time) const;  // rounded up

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
  std::string lost_;                  // how the transport failed, on one line; empty: it has not
  std::optional<std::future<void>> aborted_;  // ready when the transport has been ended, once that was begun

  std::mutex mutex_;
  std::string told_;                       // by the training thread; guarded by mutex_
  std::atomic<bool> group_failed_{false};  // and that it is there
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace holdfast
