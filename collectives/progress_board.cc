#include "holdfast/collectives/progress_board.h"

#include <array>
#include <tuple>

namespace holdfast {

std::string_view phase_name(Phase phase) {
  constexpr std::array<std::string_view, 6> kNames = {"outside", "begin",  "observe",
                                                      "reduce",  "decide", "update"};
  return kNames[static_cast<std::size_t>(phase)];
}

bool Place::behind(const Place& other) const {
  return std::tie(epoch, attempt, step) < std::tie(other.epoch, other.attempt, other.step);
}

}  // namespace holdfast
