// Who is missing: the reasoning of rank 0 and of its deputy, without sockets, threads or clocks.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "holdfast/collectives/departure.h"

namespace holdfast {

// What a rank's watchdog says of its rank when asked.
struct Answer {
  Place place;
  bool paused = false;
  std::uint32_t deadlines_missed = 0;  // how many times its deadline it has stood still, rounded down
  std::string lost = {};               // how the transport failed; empty: it has not
  bool trainer_knows = false;          // of that, and sees to the end itself
};

// Fed with what comes in from the ranks and once with each tick; says when to ask and when to leave.
//
// A rank that has stood still for its deadline raises a suspicion: that may be the stuck rank itself or one
// that waits for it. All are asked where they stand. Who does not answer in time is silent. Who answers from
// a place behind all others' and is overdue is stuck; whoever is between waits for it. When nobody is either,
// one is merely slow, or all are: that is a warning, and only after kPatience deadlines at one and the same
// place everybody leaves.
//
// A rank whose transport failed raises a suspicion, too: others may have died with it. When nobody is missing
// it is left to the training thread, which meets the failure in its next collective and ends the run in
// order. If it does not come by within a grace, and is not paused, all leave: there can be no next verdict.
class Lookout {
 public:
  struct Options {
    std::int64_t answer_ticks = 10;  // a rank has so long to answer
    std::int64_t death_ticks = 3;  // from the first closed connection to leaving: several may close together,
                                   // and mpirun must see the one that died first
    int defers_to = -1;            // the deputy: says nothing while this rank is there to say it
    std::int64_t hurried_ticks = 4;  // instead of answer_ticks, when this process may be killed any moment
    std::int64_t lost_ticks = 40;    // the grace of a transport that failed
  };
  static constexpr std::uint32_t kPatience = 10;

  enum class Move { kNothing, kAsk, kWarn, kLeave };

  // `peers`: every rank of the job but this one.
  Lookout(RankIdentity self, std::vector<RankIdentity> peers, Options options);

  void suspect() { suspected_ = true; }
  void hurry() { hurried_ = suspected_ = true; }  // suspect, and conclude sooner this time
  void answered(int rank, const Answer& answer);
  void closed(int rank);   // without goodbye
  void goodbye(int rank);  // it is done and will close

  // Once a tick, with this rank's own answer. kAsk: ask all peers. kLeave: tell all, leave; departure() says
  // why.
  Move tick(const Answer& own);

  const Departure& departure() const { return departure_; }

  // Calls visit(identity, last place or none, ticks since it was heard) for each peer, by rank.
  template <typename Visit>
  void each_peer(Visit&& visit) const {
    for (const auto& [rank, peer] : peers_) {
      visit(peer.who, peer.ever_answered ? std::optional<Place>(peer.last.place) : std::nullopt,
            peer.ticks_since_heard);
    }
  }

  bool someone_closed() const { return since_death_ >= 0; }

 private:
  struct Peer {
    RankIdentity who;
    enum class State { kHere, kClosed, kSaidGoodbye } state = State::kHere;
    bool answered = false;  // the running inquiry
    Answer last;
    bool ever_answered = false;
    std::int64_t ticks_since_heard = 0;
  };

  Move ask();
  Move conclude(const Answer& own);
  Move leave(const Answer& own);
  MissingRank missing(const Peer& peer, Absence absence) const;
  bool all_answered() const;
  bool anyone_paused(const Answer& own) const;
  bool trainer_sits_in_lost_transport(const Answer& own) const;
  std::string transport_failure(const Answer& own) const;
  bool speaker_is_connected() const;

  const RankIdentity self_;
  const Options options_;
  std::map<int, Peer> peers_;  // by rank
  bool suspected_ = false;
  bool hurried_ = false;
  std::int64_t asked_ = -1;        // ticks since the running inquiry began; -1 when there is none
  std::int64_t since_death_ = -1;  // ticks since the first closed connection
  std::int64_t since_lost_ = 0;    // ticks that a transport has been lost, and a training thread not known it
  Departure departure_;
};

}  // namespace holdfast
