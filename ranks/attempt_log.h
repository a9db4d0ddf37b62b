// What one rank saw of the running attempt: turned into its record, and into its report if it was bad.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "holdfast/collectives/record.h"
#include "holdfast/coord/incident.h"
#include "holdfast/scan.h"

namespace holdfast {

// All that was observed at one stage of an attempt.
struct StageTally {
  static constexpr std::size_t kMostNames = 64;
  std::uint64_t tensors = 0;  // observations
  std::uint64_t elements = 0;
  BadCounts bad;
  double abs_max = 0;
  std::optional<DType> dtype;      // the one that holds the largest values
  std::vector<std::string> names;  // of the first ones; longer than `tensors` when an attempt before had more
};

class AttemptLog {
 public:
  AttemptLog(int rank, std::string host);

  void clear();  // a new attempt
  // What the rank claims to be at, for the case that the ranks disagree.
  void claim(const Agreement& agreement) { view_.agreement = agreement; }
  void micro_batch(int index) { micro_batch_ = index; }
  // `offset` is where the probed elements begin in `tensor`.
  void add(Stage stage, std::string_view tensor, const Probe& probe, std::int64_t offset, DType dtype);
  void add_loss(double loss);                          // of one micro-batch; their mean is reported
  void set_error(Stage stage, std::string_view what);  // the first one counts
  // Both survive clear(): they belong to an update that was already applied.
  void set_failed_update(std::string_view what);
  void add_written(std::string_view tensor, const Probe& probe, std::int64_t offset);
  void annotate(std::string_view name, std::int64_t value);
  // Asks for this attempt to be skipped, and says why; the first reason counts.
  void fire_rule(std::string_view what);
  // Survives clear(): an attempt that is skipped must not swallow it.
  void request_stop() { stop_requested_ = true; }
  void set_no_next_batch() { no_next_batch_ = true; }  // survives clear(): data that ended stays ended

  // Going back undoes the update that failed or wrote something that is not finite, and where the data ended.
  void go_back();
  // This rank's part of the proof, and the digests of which it is made.
  void prove(std::uint64_t lane, const std::vector<std::uint64_t>& digests);

  const StageTally& tally(Stage stage) const { return tallies_[static_cast<std::size_t>(stage)]; }
  const std::string& host() const { return view_.host; }

  bool has_error() const { return view_.error.has_value(); }

  // Ready for the wire; `agreement_lane` is this rank's part of it.
  Record record(std::uint64_t agreement_lane) const;

  // What this rank has to tell rank 0 about an attempt with this verdict; "" for nothing. `names`: of the
  // tensors that were proven, when replicas differ and rank 0 has other ones.
  std::string report(const Verdict& verdict, const std::vector<std::string>& names = {}) const;

 private:
  bool bad_of_its_own_making() const;

  void count(Stage stage, std::string_view tensor, const Probe& probe, DType dtype);

  Record record_;
  RankView view_;
  std::array<StageTally, kStageCount> tallies_;
  int micro_batch_ = 0;
  bool stop_requested_ = false;
  bool no_next_batch_ = false;
  long double loss_sum_ = 0.0L;  // of finite losses it cannot overflow
  int losses_ = 0;
  std::optional<LocalError> failed_update_;
  std::vector<Finding> written_;  // non-finite values that the update wrote
  BadCounts written_counts_;
};

}  // namespace holdfast
