#include "holdfast/collectives/record.h"

#include <algorithm>
#include <cassert>

namespace holdfast {
namespace {

constexpr std::uint64_t kProtocolVersion = 2;

constexpr std::array<std::string_view, kStageCount> kStageNames = {"input",    "forward",   "loss",
                                                                   "backward", "reduction", "optimizer"};

// SplitMix64's finaliser: a bijection of 64-bit integers with good avalanche.
std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// Odd, so that multiplying by it loses nothing; the first rank takes what makes the sum zero.
std::uint64_t odd_coefficient(int rank) { return mix(static_cast<std::uint64_t>(rank)) | 1; }

void add_saturating(std::uint64_t& lane, std::uint64_t count) {
  lane = std::min(lane + std::min(count, Record::kMaxPerRank), Record::kMaxPerRank);
}

}  // namespace

std::string_view stage_name(Stage stage) { return kStageNames[static_cast<std::size_t>(stage)]; }

bool parse_stage(std::string_view name, Stage* stage) {
  const auto found = std::find(kStageNames.begin(), kStageNames.end(), name);
  if (found == kStageNames.end()) return false;
  *stage = static_cast<Stage>(found - kStageNames.begin());
  return true;
}

BadCounts& BadCounts::operator+=(const BadCounts& other) {
  nan += other.nan;
  pos_inf += other.pos_inf;
  neg_inf += other.neg_inf;
  return *this;
}

std::uint64_t agreement_hash(const Agreement& agreement) {
  std::uint64_t h = mix(kProtocolVersion);
  h = mix(h ^ agreement.epoch);
  h = mix(h ^ agreement.attempt);
  return mix(h ^ agreement.policy_hash);
}

std::uint64_t agreement_coefficient(int rank, int world_size) {
  assert(rank >= 0 && rank < world_size);
  if (rank != 0) return odd_coefficient(rank);
  std::uint64_t others = 0;
  for (int r = 1; r < world_size; ++r) others += odd_coefficient(r);
  return ~others + 1;
}

std::uint64_t agreement_coefficient(int rank, std::span<const int> members) {
  assert(std::ranges::find(members, rank) != members.end());
  if (rank != members.front()) return odd_coefficient(rank);
  std::uint64_t others = 0;
  for (const int r : members.subspan(1)) others += odd_coefficient(r);
  return ~others + 1;
}

void Record::add_bad(Stage stage, const BadCounts& counts) {
  add_saturating(lanes_[bad_lane(stage, ValueClass::kNan)], counts.nan);
  add_saturating(lanes_[bad_lane(stage, ValueClass::kPosInf)], counts.pos_inf);
  add_saturating(lanes_[bad_lane(stage, ValueClass::kNegInf)], counts.neg_inf);
}

void Record::set_error() { lanes_[kErrorLane] = 1; }
void Record::set_update_failed() { lanes_[kUpdateFailedLane] = 1; }
void Record::set_request(Request request) { lanes_[kRequestLane + static_cast<std::size_t>(request)] = 1; }
void Record::set_no_next_batch() { lanes_[kNoNextBatchLane] = 1; }

void Record::set_participant(std::uint64_t agreement_lane) {
  lanes_[kParticipantsLane] = 1;
  lanes_[kAgreementLane] = agreement_lane;
}

void Record::mark_bad(int rank) {
  lanes_[kBadRanksLane] = 1;
  lanes_[kBadRankSumLane] = static_cast<std::uint64_t>(rank);
}

void Record::set_part_done() { lanes_[kPartsDoneLane] = 1; }
void Record::set_replica_proof(std::uint64_t lane) { lanes_[kReplicaProofLane] = lane; }

Record& Record::operator+=(const Record& other) {
  for (std::size_t i = 0; i < kLanes; ++i) lanes_[i] += other.lanes_[i];
  return *this;
}

}  // namespace holdfast
