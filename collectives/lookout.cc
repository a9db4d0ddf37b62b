#include "lookout.h"

#include <algorithm>
#include <limits>

namespace holdfast {

Lookout::Lookout(RankIdentity self, std::vector<RankIdentity> peers, Options options)
    : self_(std::move(self)), options_(options) {
  for (RankIdentity& peer : peers) {
    const int rank = peer.rank;
    peers_[rank].who = std::move(peer);
  }
}

void Lookout::answered(int rank, const Answer& answer) {
  const auto found = peers_.find(rank);
  if (found == peers_.end()) return;
  Peer& peer = found->second;
  peer.answered = true;
  peer.ever_answered = true;
  peer.last = answer;
  peer.ticks_since_heard = 0;
}

void Lookout::closed(int rank) {
  const auto found = peers_.find(rank);
  if (found == peers_.end() || found->second.state != Peer::State::kHere) return;
  found->second.state = Peer::State::kClosed;
  if (since_death_ < 0) since_death_ = 0;
}

void Lookout::goodbye(int rank) {
  const auto found = peers_.find(rank);
  if (found != peers_.end()) found->second.state = Peer::State::kSaidGoodbye;
}

Lookout::Move Lookout::tick(const Answer& own) {
  for (auto& [rank, peer] : peers_) ++peer.ticks_since_heard;
  since_lost_ = anyone_paused(own) || !trainer_sits_in_lost_transport(own) ? 0 : since_lost_ + 1;
  if (since_death_ >= 0 && !speaker_is_connected()) {
    // The dead are known; the question is only where the others were.
    if (since_death_++ == 0) return ask();
    return since_death_ > options_.death_ticks ? leave(own) : Move::kNothing;
  }
  if (asked_ >= 0) {
    ++asked_;
    const std::int64_t patience = hurried_ ? options_.hurried_ticks : options_.answer_ticks;
    return asked_ >= patience || all_answered() ? conclude(own) : Move::kNothing;
  }
  return suspected_ ? ask() : Move::kNothing;
}

Lookout::Move Lookout::ask() {
  for (auto& [rank, peer] : peers_) peer.answered = false;
  suspected_ = false;
  asked_ = 0;
  return Move::kAsk;
}

bool Lookout::speaker_is_connected() const {
  const auto found = peers_.find(options_.defers_to);
  return found != peers_.end() && found->second.state == Peer::State::kHere;
}

bool Lookout::all_answered() const {
  return std::all_of(peers_.begin(), peers_.end(), [](const auto& entry) {
    return entry.second.answered || entry.second.state != Peer::State::kHere;
  });
}

Lookout::Move Lookout::conclude(const Answer& own) {
  asked_ = -1;
  hurried_ = false;
  suspected_ = false;  // whoever still stands still says so again
  if (speaker_is_connected() && peers_.at(options_.defers_to).answered) return Move::kNothing;
  Place front = own.place;
  std::uint32_t least_missed = own.deadlines_missed;
  for (const auto& [rank, peer] : peers_) {
    if (!peer.answered) continue;
    if (front.behind(peer.last.place)) front = peer.last.place;
    least_missed = std::min(least_missed, peer.last.deadlines_missed);
  }

  bool someone_slow = own.place.behind(front) && own.deadlines_missed == 0;
  bool someone_paused = own.paused;
  bool someone_missing = own.place.behind(front) && own.deadlines_missed > 0;
  bool someone_left = false;
  bool someone_overdue = own.deadlines_missed > 0;
  for (const auto& [rank, peer] : peers_) {
    if (peer.answered && peer.last.deadlines_missed > 0) someone_overdue = true;
    if (peer.state == Peer::State::kSaidGoodbye) {
      someone_left = true;
    } else if (!peer.answered) {
      someone_missing = true;
    } else if (peer.last.paused) {
      someone_paused = true;
    } else if (peer.last.place.behind(front)) {
      (peer.last.deadlines_missed > 0 ? someone_missing : someone_slow) = true;
    }
  }
  // Others wait for whoever is paused, and may look stuck meanwhile.
  if (someone_paused) return Move::kNothing;
  // Asked in a hurry, others may simply be about to leave too: it is the end of the run, or an orderly stop.
  if (someone_left && someone_overdue) someone_missing = true;
  if (someone_missing || since_lost_ > options_.lost_ticks) return leave(own);
  if (someone_slow || least_missed == 0) return Move::kNothing;
  return least_missed >= kPatience ? leave(own) : Move::kWarn;
}

bool Lookout::anyone_paused(const Answer& own) const {
  return own.paused || std::ranges::any_of(peers_, [](const auto& entry) {
           return entry.second.state == Peer::State::kHere && entry.second.last.paused;
         });
}

bool Lookout::trainer_sits_in_lost_transport(const Answer& own) const {
  const auto sits = [](const Answer& answer) { return !answer.lost.empty() && !answer.trainer_knows; };
  return sits(own) || std::ranges::any_of(peers_, [&](const auto& entry) {
           return entry.second.state == Peer::State::kHere && sits(entry.second.last);
         });
}

// "" when there is none. Whoever is done needs no transport; who died may have died of it.
std::string Lookout::transport_failure(const Answer& own) const {
  int lowest = own.lost.empty() ? std::numeric_limits<int>::max() : self_.rank;
  std::string what = own.lost;
  for (const auto& [rank, peer] : peers_) {
    if (rank > lowest || peer.state == Peer::State::kSaidGoodbye || peer.last.lost.empty()) continue;
    lowest = rank;
    what = peer.last.lost;
  }
  return what.empty() ? what : "rank " + std::to_string(lowest) + ": " + what;
}

MissingRank Lookout::missing(const Peer& peer, Absence absence) const {
  MissingRank rank{peer.who, absence, std::nullopt};
  if (peer.ever_answered) rank.last_seen = peer.last.place;
  return rank;
}

Lookout::Move Lookout::leave(const Answer& own) {
  Place front = own.place;
  for (const auto& [rank, peer] : peers_) {
    if (peer.answered && front.behind(peer.last.place)) front = peer.last.place;
  }
  departure_ = Departure();
  departure_.reported_by = self_.rank;
  departure_.transport_failure = transport_failure(own);
  const bool deaths = since_death_ > 0;
  // Whoever answers may be behind because the absent no longer take part: a collective can have ended on some
  // ranks and not on others.
  const bool absent = deaths || std::ranges::any_of(peers_, [](const auto& entry) {
                        return entry.second.state != Peer::State::kHere || !entry.second.answered;
                      });
  // Of those who stand behind the front, the rearmost are the ones that all others wait for.
  Place rear = front;
  const auto look_for_rear = [&](const Answer& answer) {
    if (answer.deadlines_missed > 0 && answer.place.behind(rear)) rear = answer.place;
  };
  look_for_rear(own);
  for (const auto& [rank, peer] : peers_) {
    if (peer.answered) look_for_rear(peer.last);
  }
  const auto sort_in = [&](const RankIdentity& who, const Answer& answer) {
    const bool at_rear = answer.place.behind(front) && !rear.behind(answer.place);
    if (!absent && at_rear && answer.deadlines_missed > 0) {
      departure_.missing.push_back({who, Absence::kStuck, answer.place});
    } else {
      departure_.survivors.push_back({who, answer.place});
    }
  };
  sort_in(self_, own);
  for (const auto& [rank, peer] : peers_) {
    if (peer.state == Peer::State::kClosed) {
      departure_.missing.push_back(missing(peer, Absence::kDied));
    } else if (peer.state == Peer::State::kSaidGoodbye) {
      if (!deaths) departure_.missing.push_back(missing(peer, Absence::kLeft));
    } else if (!peer.answered) {
      if (!deaths) departure_.missing.push_back(missing(peer, Absence::kSilent));
    } else {
      sort_in(peer.who, peer.last);
    }
  }
  const auto by_rank = [](const auto& a, const auto& b) { return a.who.rank < b.who.rank; };
  std::ranges::sort(departure_.missing, by_rank);
  std::ranges::sort(departure_.survivors, by_rank);
  return Move::kLeave;
}

}  // namespace holdfast
