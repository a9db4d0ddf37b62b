// A job as a lookout sees it: ranks that answer, or do not.
#pragma once

#include <ostream>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "lookout.h"

namespace holdfast {

// The waiting ranks stand here, two deadlines long.
inline constexpr Place kFront{1, 20, 5, Phase::kDecide};
inline constexpr Place kBehind{1, 20, 3, Phase::kObserve};

inline RankIdentity rank_on_its_node(int rank) { return {rank, "node" + std::to_string(rank), 1000 + rank}; }

class LookoutWorld {
 public:
  static constexpr std::int64_t kAnswerTicks = 10;
  static constexpr std::int64_t kDeathTicks = 3;
  static constexpr std::int64_t kHurriedTicks = 4;
  static constexpr std::int64_t kLostTicks = 30;

  LookoutWorld(int ranks, int self, int defers_to = -1)
      : answers_(static_cast<std::size_t>(ranks), Answer{kFront, false, 2}),
        self_(self),
        lookout_(rank_on_its_node(self), others(ranks, self),
                 {kAnswerTicks, kDeathTicks, defers_to, kHurriedTicks, kLostTicks}) {}

  Answer& rank(int r) { return answers_[static_cast<std::size_t>(r)]; }
  void everybody(const Answer& answer) { answers_.assign(answers_.size(), answer); }
  void silence(int r) { silent_.insert(r); }
  void wake(int r) { silent_.erase(r); }

  Lookout& lookout() { return lookout_; }
  Lookout::Move tick() { return lookout_.tick(rank(self_)); }

  void answer(int r) { lookout_.answered(r, rank(r)); }
  void all_answer() {
    for (int r = 0; r < static_cast<int>(answers_.size()); ++r) {
      if (r != self_ && !silent_.contains(r)) answer(r);
    }
  }

  // Ticks until something is to be done, at most `most` times; all who can answer do so when asked. The moves
  // made, without kNothing.
  std::vector<Lookout::Move> run(int most = 40) {
    std::vector<Lookout::Move> moves;
    for (int i = 0; i < most; ++i) {
      const Lookout::Move move = tick();
      if (move != Lookout::Move::kNothing) moves.push_back(move);
      if (move == Lookout::Move::kAsk) all_answer();
      if (move == Lookout::Move::kLeave) break;
    }
    return moves;
  }
  std::vector<Lookout::Move> inquire() {
    lookout_.suspect();
    return run();
  }

 private:
  static std::vector<RankIdentity> others(int ranks, int self) {
    std::vector<RankIdentity> peers;
    for (int r = ranks; r-- > 0;) {  // in no particular order
      if (r != self) peers.push_back(rank_on_its_node(r));
    }
    return peers;
  }

  std::vector<Answer> answers_;
  std::set<int> silent_;
  const int self_;
  Lookout lookout_;
};

inline void PrintTo(Lookout::Move move, std::ostream* out) {
  const char* const names[] = {"nothing", "ask", "warn", "leave"};
  *out << names[static_cast<int>(move)];
}

// "1 died, 3 stuck": the missing in the order reported.
inline std::string missing_text(const Departure& departure) {
  std::string text;
  for (const MissingRank& rank : departure.missing) {
    text += (text.empty() ? "" : ", ") + std::to_string(rank.who.rank) + " " +
            std::string(absence_name(rank.absence));
  }
  return text;
}

inline std::vector<int> survivors_of(const Departure& departure) {
  std::vector<int> ranks;
  for (const SurvivingRank& rank : departure.survivors) ranks.push_back(rank.who.rank);
  return ranks;
}

using Moves = std::vector<Lookout::Move>;
using Ranks = std::vector<int>;
inline const Moves kAskOnly = {Lookout::Move::kAsk};
inline const Moves kAskAndWarn = {Lookout::Move::kAsk, Lookout::Move::kWarn};
inline const Moves kAskAndLeave = {Lookout::Move::kAsk, Lookout::Move::kLeave};

}  // namespace holdfast
