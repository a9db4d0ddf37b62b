// Who was missing when the others left.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "holdfast/collectives/progress_board.h"

namespace holdfast {

struct RankIdentity {
  int rank = 0;
  std::string host;
  std::int64_t pid = 0;
};

enum class Absence : int {
  kDied,    // its connection closed
  kSilent,  // its watchdog does not answer: stopped, or cut off
  kStuck,   // it answers, but its attempt stands still behind the others'
  kLeft     // it said that it was done while the others were not
};
std::string_view absence_name(Absence absence);  // "died", "silent", "stuck", "left"

struct MissingRank {
  RankIdentity who;
  Absence absence = Absence::kDied;
  std::optional<Place> last_seen;
};

struct SurvivingRank {
  RankIdentity who;
  Place place;
};

// Made by one rank for all: rank 0, its deputy when rank 0 is the one missing, or each rank for itself when
// it can reach neither.
struct Departure {
  int reported_by = 0;
  std::vector<MissingRank> missing;  // empty: all stand still at one place
  std::vector<SurvivingRank> survivors;
  bool alone = false;  // the reporter could reach nobody, and knows only that it stands still
  // "rank 1: ...", where the transport said that it failed, to a training thread or to a watchdog; of several
  // the lowest. Empty: nowhere.
  std::string transport_failure;

  // One line for people: "rank 2 (host b, pid 71) is silent, last seen at attempt 12, phase observe; ...".
  // Names the first few.
  std::string describe() const;
};

}  // namespace holdfast
