// One attempt that was not clean, as rank 0 sees it.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "holdfast/collectives/record.h"
#include "holdfast/collectives/verdict.h"

namespace holdfast {

// Non-finite values of one tensor on one rank.
struct Finding {
  Stage stage = Stage::kInput;
  std::string tensor;
  std::uint64_t index = 0;  // first bad element, flat, row-major
  BadCounts counts;
  int micro_batch = 0;  // -1: of the whole accumulation window
};

// An exception caught on one rank.
struct LocalError {
  Stage stage = Stage::kInput;
  std::string what;
};

// A number that the trainer thought worth keeping, such as the count of valid targets.
struct Fact {
  std::string name;
  std::int64_t value = 0;
};

// What one rank saw of its attempt.
struct RankView {
  int rank = 0;
  std::string host;
  std::vector<Finding> findings;  // in the order seen
  std::optional<LocalError> error;
  double loss = std::numeric_limits<double>::quiet_NaN();  // as it is, never patched
  bool has_loss = false;
  Agreement agreement;
  std::vector<Fact> facts;
  std::vector<std::uint64_t> replica_digests;  // of the tensors that were proven, when replicas differ
  std::vector<std::string> proven_tensors;  // which; only of the first rank of a group that is not rank 0's
  std::string fired_rule;  // what a rule said by which this rank asks for the attempt to be skipped
};

// A rank's view as bytes. decode_rank_view() takes anything and gives false for what it cannot read.
std::string encode_rank_view(const RankView& view);
bool decode_rank_view(const std::string& bytes, RankView* view);

// A view never names more tensors than this; the counts on the wire are whole all the same. When a learning
// rate blows up, every tensor of every rank is bad, and the first few say all there is to say.
inline constexpr std::size_t kMaxFindingsPerRank = 16;

// Where a rank first met the attempt's earliest non-finite stage.
struct Origin {
  int rank = 0;
  std::string host;
  Finding finding;   // its first bad tensor at that stage
  BadCounts counts;  // over the tensors it reported at that stage
  std::vector<Fact> facts;
};

// The loss scale that an attempt was made with.
struct LossScaleView {
  double scale = 1.0;
  bool exhausted = false;  // an overflow now finds nothing left to halve

  // What a restart goes on with if the attempt is skipped, see LossScaler::State.
  struct State {
    double scale = 1.0;
    std::uint64_t clean_updates = 0;
    std::uint64_t overflows_to_halve = 1;
  };
  std::optional<State> after_skip = {};
};

struct Incident {
  std::uint64_t epoch = 0;
  std::uint64_t attempt = 0;
  std::uint64_t update = 0;  // updates applied before this attempt
  Verdict verdict;
  std::vector<RankView> views;                   // of the ranks that had something to say, by rank
  std::optional<LossScaleView> loss_scale = {};  // when the trainer scales its loss
  std::vector<std::string> proven_tensors = {};  // when replicas differ: whose digests rank 0's group has
  // By rank: the name of its replica group. Empty when all ranks are of one.
  std::vector<std::string> replica_groups = {};
  bool closing = false;  // found after the last attempt: there is nothing left to skip

  // One origin for each rank that saw the earliest non-finite stage, by rank.
  std::vector<Origin> origins() const;
  // What the lowest rank with a fired rule said; empty for none.
  std::string fired_rule() const;
  // The view with the lowest rank that has an error, if any.
  const RankView* first_error() const;
  // The stage to put in the log: the optimizer's when it was an update that failed, else the earliest
  // non-finite one, else that of the first error.
  std::optional<Stage> stage() const;
  // Non-finite values at that stage over all ranks; those of one replica when every replica wrote the same.
  BadCounts counts() const;
  // "replicas differ: rank 2 (host h) against the other 3, first in conv1.weight"; the minority, or all when
  // none is the largest. The same of each replica group in which they differ: "replicas differ in pp=1,tp=0:
  // ...".
  std::string describe_divergence() const;
  // One sentence: "1 non-finite value at backward, first on rank 2 (host h) in conv1.weight[71]".
  std::string describe() const;
  // The same of the first error: "exception on rank 1 (host h) at forward: bad allocation".
  std::string describe_error() const;
};

}  // namespace holdfast
