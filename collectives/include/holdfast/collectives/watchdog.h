// Ends this process when its attempts stop making progress, together with the others', so that a hang is
// never for ever and the ones to blame are named.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "holdfast/collectives/collective.h"
#include "holdfast/collectives/departure.h"
#include "holdfast/collectives/progress_board.h"
#include "holdfast/collectives/status.h"

namespace holdfast {

// Where a rank was when it last said so.
struct RankReport {
  RankIdentity who;
  std::optional<Place> place;  // none: it has not said so yet
  double seconds_ago = 0;
};

// A thread that wakes at every tick and looks whether the attempt moved. Hangs are mostly met inside the
// trainer's own collectives, where the main thread sits in MPI and nothing can be returned to it: so at the
// deadline it is this thread that ends the process, with _exit(84). It never calls MPI.
//
// The watchdogs of a job are connected, each to rank 0 and to a deputy on another host where there is one. A
// rank that dies is known at once, from its closed connection. When a rank has stood still for its deadline,
// rank 0 asks all of them where they stand, and makes out who is missing: see Lookout. It puts that on
// record, tells the others, and all leave. The deputy does it when rank 0 is the one missing; a rank that
// reaches neither leaves by itself. When all are slow and nobody is missing, rank 0 warns, and waits.
//
// It also asks the transport itself, see Options::health: a failure that nobody waits for in a collective is
// known at the next tick or the one after, is put on stderr, and ends the transport at once, so that whoever
// waits in it returns. From there on it is as after a collective that failed: the watchdogs find out who is
// missing. When nobody is, and the training thread has not met the failure in some seconds, all leave. What
// is done in a pause may still be finished: while a rank is paused only a death makes all leave.
//
// On a clean run the training thread makes a few relaxed stores a call, and each watchdog sends some 30 bytes
// a second.
class Watchdog {
 public:
  struct Options {
    std::chrono::milliseconds tick{100};
    // Without progress for so long a rank is overdue. Zero: 20 times the median attempt of this run, but at
    // least `floor`, and 5 times `floor` until 8 attempts were seen.
    std::chrono::milliseconds deadline{0};
    std::chrono::milliseconds floor{std::chrono::minutes(1)};
    // False: each rank knows only of itself.
    bool side_channel = true;
    // Looked at with each tick: true once somebody, such as a launcher that lost a host, has asked this
    // process to end. The watchdogs then make out at once whether anybody is missing.
    std::function<bool()> asked_to_end;
    // Called on the watchdog's thread of the reporting rank, before anybody leaves, and given two seconds:
    // puts the departure on record.
    std::function<void(const Departure&)> record;
    // How the transport is, looked at with each tick, in a pause too, until it fails once. It must not block:
    // the watchdog's thread asks, which has peers to answer meanwhile. See Collective::health().
    std::function<Status()> health;
    // Ends the transport, see Collective::abort(): called once, on a thread of its own, when its health
    // fails or before this process ends with exit code 84, which waits two seconds for it.
    std::function<void()> abort;
    // Called once, on a thread of its own, before this process ends with exit code 84, in the same two
    // seconds: lets go of what else would hold up others, such as communicators of the trainer's own.
    std::function<void()> before_leaving;
    // Called on the watchdog's thread of rank 0, once a second: where all ranks are, by rank. Without a side
    // channel it knows of itself only.
    std::function<void(std::vector<RankReport>)> heard;
  };

  // Collective. Connects the watchdogs (unless the job is one rank, or `side_channel` is false) and starts
  // them. USAGE on every rank when one cannot connect. The job's secret goes over `collective`.
  static Status create(Collective& collective, const Options& options, std::unique_ptr<Watchdog>* out);

  // Of one rank that knows only of itself.
  Watchdog(int rank, const Options& options);

  // Says goodbye and stops the thread. Not collective.
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  // Where the training thread says how far it is.
  ProgressBoard& board();

  // A collective failed on this rank, which is not stuck and yet cannot go on: asks who is missing. If
  // somebody is, all leave, this process among them; if nobody is, the end is the caller's. A watchdog that
  // has nobody to ask goes on watching for the deadline alone. Any thread; returns at once.
  // `why` goes into the departure.
  void group_failed(const std::string& why);

 private:
  class Impl;
  explicit Watchdog(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace holdfast
