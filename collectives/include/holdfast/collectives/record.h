// What one rank puts on the wire for one attempt: 32 unsigned 64-bit integers, summed over the ranks by one
// all-reduce. Integers only: a reduced float cannot decide anything, since MPI_MAX over a NaN depends on
// which rank holds it.
//
//   lane    content (of one rank)                                    in the sum
//   0-17    non-finite values, stage * 3 + class                     totals
//   18      1 if an exception was caught since the last decision,    ranks with an error
//           in the attempt or in the update before it
//   19      1 if the update failed after the last APPLY              ranks whose update failed
//   20-23   1 for each kind of request this rank makes               ranks asking
//   24      1 if this rank has no batch for the next attempt         ranks about to run dry
//   25      1                                                        participants
//   26      agreement: c_r * h mod 2^64, see agreement_lane()        0 when all ranks agree
//   27      1 if this rank is bad (see Record::mark_bad)             bad ranks
//   28      this rank's number if it is bad, else 0                  that number, when lane 27 is 1
//   29      1 if its part of the checkpoint in flight is on disk     ranks that are done with theirs
//   30      proof: c_r * d mod 2^64, d a hash of its replica's       0 when all replicas are equal, in each
//           state; 0 in an attempt without a proof                   replica group, and when none is proven
//   31      0                                                        0; reserved
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>

namespace holdfast {

// Where in an attempt a value was seen, in the order in which an attempt runs. kReduction is the gradient
// sum itself: finite on every rank, overflowed in the sum.
enum class Stage : int { kInput, kForward, kLoss, kBackward, kReduction, kOptimizer };
inline constexpr int kStageCount = 6;

enum class ValueClass : int { kNan, kPosInf, kNegInf };
inline constexpr int kValueClassCount = 3;

enum class Request : int { kStop, kRuleFired, kRollBack, kCapture };
inline constexpr int kRequestCount = 4;

std::string_view stage_name(Stage stage);  // "input", "forward", ...
bool parse_stage(std::string_view name, Stage* stage);

// Non-finite values by class.
struct BadCounts {
  std::uint64_t nan = 0;
  std::uint64_t pos_inf = 0;
  std::uint64_t neg_inf = 0;

  std::uint64_t total() const { return nan + pos_inf + neg_inf; }
  BadCounts& operator+=(const BadCounts& other);
  bool operator==(const BadCounts&) const = default;
};

// What every rank must agree on before a verdict means anything.
struct Agreement {
  std::uint64_t epoch = 0;        // grows at every start, restore and rollback
  std::uint64_t attempt = 0;      // numbered by data position, from 0
  std::uint64_t policy_hash = 0;  // of the effective policy

  bool operator==(const Agreement&) const = default;
};

// The part that a rank adds to the agreement lane: c_r * h mod 2^64, where h is a 64-bit hash of the protocol
// version and `agreement`, and the coefficients c_r sum to zero over the ranks of a job. The sum is zero when
// all ranks pass the same h, and nonzero with probability 1 - 2^-64 when any differs.
// Comparing N * sum(h^2) with (sum h)^2 instead goes wrong as soon as either wraps.
std::uint64_t agreement_hash(const Agreement& agreement);
std::uint64_t agreement_coefficient(int rank, int world_size);  // O(world_size) on rank 0; compute once
// The same for one group of ranks among others whose lanes are added up in the same sum: `members` is the
// group, in order, with `rank` in it. They sum to zero in each group, and no two groups use the same ones, so
// that what is wrong in one group is not cancelled by its mirror image in another. 0 for a rank that is
// alone.
std::uint64_t agreement_coefficient(int rank, std::span<const int> members);

class Record {
 public:
  static constexpr std::size_t kLanes = 32;
  // Where what is, for code that has no more than the lanes: a kernel.
  enum Lane : std::size_t {
    kBadLane = 0,
    kErrorLane = kStageCount * kValueClassCount,
    kUpdateFailedLane,
    kRequestLane,
    kNoNextBatchLane = kRequestLane + kRequestCount,
    kParticipantsLane,
    kAgreementLane,
    kBadRanksLane,
    kBadRankSumLane,
    kPartsDoneLane,
    kReplicaProofLane,
    kFirstReservedLane
  };
  static_assert(kFirstReservedLane == 31);
  static constexpr std::size_t bad_lane(Stage stage, ValueClass value_class) {
    return kBadLane + static_cast<std::size_t>(stage) * kValueClassCount +
           static_cast<std::size_t>(value_class);
  }

  // Counts saturate here, so that 2^20 ranks cannot wrap a lane back to zero.
  static constexpr std::uint64_t kMaxPerRank = (std::uint64_t{1} << 44) - 1;

  void add_bad(Stage stage, const BadCounts& counts);
  void set_error();
  void set_update_failed();
  void set_request(Request request);
  void set_no_next_batch();
  void set_participant(std::uint64_t agreement_lane);
  // A rank is bad if it saw, of its own making, a non-finite value or an error. Findings in the reduced
  // gradient alone do not make a rank bad: the same sum is on every rank.
  void mark_bad(int rank);
  void set_part_done();
  void set_replica_proof(std::uint64_t lane);  // c_r * hash, c_r of its replica group

  // Inline: a verdict reads each of them in every attempt.
  std::uint64_t bad(Stage stage, ValueClass value_class) const {
    return lanes_[bad_lane(stage, value_class)];
  }
  BadCounts bad(Stage stage) const {
    return {bad(stage, ValueClass::kNan), bad(stage, ValueClass::kPosInf), bad(stage, ValueClass::kNegInf)};
  }
  std::uint64_t errors() const { return lanes_[kErrorLane]; }
  std::uint64_t updates_failed() const { return lanes_[kUpdateFailedLane]; }
  std::uint64_t requests(Request request) const {
    return lanes_[kRequestLane + static_cast<std::size_t>(request)];
  }
  std::uint64_t no_next_batch() const { return lanes_[kNoNextBatchLane]; }
  std::uint64_t participants() const { return lanes_[kParticipantsLane]; }
  std::uint64_t agreement() const { return lanes_[kAgreementLane]; }
  std::uint64_t bad_ranks() const { return lanes_[kBadRanksLane]; }
  std::uint64_t bad_rank_sum() const { return lanes_[kBadRankSumLane]; }
  std::uint64_t parts_done() const { return lanes_[kPartsDoneLane]; }
  std::uint64_t replica_proof() const { return lanes_[kReplicaProofLane]; }
  bool reserved_is_zero() const {
    std::uint64_t all = 0;
    for (std::size_t lane = kFirstReservedLane; lane < kLanes; ++lane) all |= lanes_[lane];
    return all == 0;
  }

  std::span<std::uint64_t, kLanes> lanes() { return lanes_; }
  std::span<const std::uint64_t, kLanes> lanes() const { return lanes_; }

  // What the all-reduce does, lane by lane, mod 2^64.
  Record& operator+=(const Record& other);
  bool operator==(const Record&) const = default;

 private:
  std::array<std::uint64_t, kLanes> lanes_{};
};

static_assert(sizeof(Record) == 256, "the record is at most 256 bytes on the wire");

}  // namespace holdfast
