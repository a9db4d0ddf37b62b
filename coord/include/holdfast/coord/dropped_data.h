// RUN_DIR/dropped.jsonl: the samples of skipped attempts, and whether dropping them changes what the model
// sees.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "holdfast/coord/chi_square.h"
#include "holdfast/coord/event_log.h"
#include "holdfast/coord/sample_source.h"

namespace holdfast {

class RunState;

// A finding that the dropped data are no fair sample.
struct DroppedDataSkew {
  std::string
      of;  // "classes": all dropped samples against the data; "shards": origin ranks against equal shares
  GoodnessOfFit fit;
  std::uint64_t most_over_observed = 0;
};

class DroppedData {
 public:
  // Below this a skew is told. Looked at after each skip, so a fair run of a hundred skips is accused about
  // once in a hundred times at most.
  static constexpr double kSmallestP = 1e-3;

  DroppedData(SampleSource source, int ranks) : source_(std::move(source)), ranks_(ranks) {}

  // Asks for the samples of a skipped attempt and counts them. `origin` is the one rank on which it began, -1
  // when there is none, several, or it was calibration. Gives the fields of the attempt's line in the ledger.
  // What the source throws is passed on, and nothing is counted.
  nlohmann::ordered_json count(std::uint64_t epoch, std::uint64_t attempt, int origin);

  // The next skew that was not told before; call until there is none.
  std::optional<DroppedDataSkew> next_skew();

  // For the run's memory. A memory of other data or another number of ranks is begun anew.
  void save(RunState* state) const;
  void restore(const RunState& state);

 private:
  const SampleSource source_;
  const int ranks_;
  std::vector<std::uint64_t> by_class_ = std::vector<std::uint64_t>(source_.class_counts.size());
  std::vector<std::uint64_t> by_origin_ = std::vector<std::uint64_t>(static_cast<std::size_t>(ranks_));
  bool told_classes_ = false;
  bool told_shards_ = false;
};

}  // namespace holdfast
