#include "holdfast/collectives/departure.h"

#include <array>

namespace holdfast {
namespace {

constexpr std::size_t kMostNamed = 8;

std::string describe(const RankIdentity& who) {
  return "rank " + std::to_string(who.rank) + " (host " + who.host + ", pid " + std::to_string(who.pid) + ")";
}

std::string describe(const Place& place) {
  return "attempt " + std::to_string(place.attempt) + " of epoch " + std::to_string(place.epoch) +
         ", phase " + std::string(phase_name(place.phase));
}

}  // namespace

std::string_view absence_name(Absence absence) {
  constexpr std::array<std::string_view, 4> kNames = {"died", "silent", "stuck", "left"};
  return kNames[static_cast<std::size_t>(absence)];
}

std::string Departure::describe() const {
  std::string text;
  if (alone) {
    text = std::string(transport_failure.empty() ? "no progress" : "the transport failed") +
           ", and neither rank 0 nor its deputy can be reached";
  } else if (missing.empty() && !transport_failure.empty()) {
    text = "the transport failed, and nobody is known to be missing";
  } else if (missing.empty()) {
    text = "every rank stands still at the same place";
  }
  for (std::size_t i = 0; i < missing.size() && i < kMostNamed; ++i) {
    const MissingRank& rank = missing[i];
    if (i > 0) text += "; ";
    text += holdfast::describe(rank.who) + " " +
            (rank.absence == Absence::kStuck || rank.absence == Absence::kSilent ? "is " : "") +
            std::string(absence_name(rank.absence));
    if (rank.last_seen) text += " at " + holdfast::describe(*rank.last_seen);
  }
  if (missing.size() > kMostNamed) text += "; and " + std::to_string(missing.size() - kMostNamed) + " more";
  if (!survivors.empty()) {
    text += ". " + std::to_string(survivors.size()) + " left behind, " +
            holdfast::describe(survivors.front().who) + " at " + holdfast::describe(survivors.front().place);
  }
  if (!transport_failure.empty()) text += ". Transport of " + transport_failure;
  return text;
}

}  // namespace holdfast
