// What rank 0 shows of a run while it goes: counters and last values.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "holdfast/collectives/record.h"

namespace holdfast {

// One metric with its samples, as Prometheus defines them.
struct MetricFamily {
  enum class Type { kCounter, kGauge };
  struct Sample {
    std::vector<std::pair<std::string, std::string>> labels;
    double value = 0;
  };
  std::string name;
  std::string help;
  Type type = Type::kGauge;
  std::vector<Sample> samples;  // none: nothing is known of it yet
};

// The text format of Prometheus, version 0.0.4. Label values are UTF-8, and may hold quotes and line ends.
std::string metrics_text(const std::vector<MetricFamily>& families);

// Last values by name, of names that are not known ahead. One writer, any readers, no lock: a name is written
// once, before it counts, and never changes. The first kMost names are kept.
class NamedValues {
 public:
  static constexpr std::size_t kMost = 64;
  // Allocates for a name's first value only.
  void set(std::string_view name, double value);
  template <typename Visit>
  void each(Visit&& visit) const {
    const std::size_t size = size_.load(std::memory_order_acquire);
    for (std::size_t i = 0; i < size; ++i) {
      visit(slots_[i].name, slots_[i].value.load(std::memory_order_relaxed));
    }
  }

 private:
  struct Slot {
    std::string name;
    std::atomic<double> value{0};
  };
  std::array<Slot, kMost> slots_;
  std::atomic<std::size_t> size_{0};
};

// The training thread writes, with a few relaxed stores an attempt and without allocating; any thread reads.
// Counters begin at 0 with the process, as Prometheus expects; gauges are the run's, restarts included.
class RunMetrics {
 public:
  // `rules`: the names of the rate rules, in the order in which set_window() counts them.
  RunMetrics(std::vector<std::string> rules, std::uint64_t most_total, std::uint64_t most_consecutive);

  // ---- the training thread
  void count_update() { add(&updates_, 1); }
  // By the stage and the class of what was found: one of nan, pos_inf, neg_inf when all of it was that, else
  // mixed; none for an exception or a rule. So each skip is counted in one place.
  void count_skip(std::optional<Stage> stage, const BadCounts& found);
  void count_ended_attempt() { add(&ended_, 1); }           // neither applied nor skipped: it ended the run
  void count_rollback() { add(&rollbacks_, 1); }            // neither: it is made again
  void count_replica_proof() { add(&replica_proofs_, 1); }  // in which all replicas agreed
  void count_failed_checkpoint(bool non_finite) { add(&failed_checkpoints_[non_finite ? 1 : 0], 1); }
  // A generation was published that every rank found clean: the state before `attempt`, as of now.
  void set_last_known_good(std::uint64_t attempt);
  void count_bundle() { add(&bundles_[0], 1); }
  void count_failed_bundle() { add(&bundles_[1], 1); }
  void count_incident() { add(&incidents_, 1); }
  void count_calibration_skips(std::uint64_t skips) { add(&calibration_skips_, skips); }
  void count_alert(std::string_view rule);
  void set_position(std::uint64_t epoch, std::uint64_t attempt, std::uint64_t update, std::uint64_t skips);
  void set_skips_charged(std::uint64_t total, std::uint64_t consecutive);
  void set_window(std::size_t rule, std::uint64_t skips, std::uint64_t attempts, bool raised);
  void set_calibration_alert(bool raised);
  void set_loss_scale(double scale, double smallest);
  void set_watched(std::string_view name, double value) { watched_.set(name, value); }
  void set_headroom(std::string_view tensor, double part) { headroom_.set(tensor, part); }
  void set_running(bool running) { running_.store(running, std::memory_order_relaxed); }

  // ---- any thread
  struct Position {
    std::uint64_t epoch = 0;
    std::uint64_t attempt = 0;  // the next one
    std::uint64_t update = 0;
    std::uint64_t skips = 0;
    std::uint64_t attempts_made = 0;   // by this process
    std::uint64_t replica_proofs = 0;  // by this process, in which all replicas agreed
  };
  Position position() const;
  std::optional<double> loss_scale() const;
  // Of names that are not UTF-8, what is not becomes U+FFFD.
  std::vector<MetricFamily> collect() const;

 private:
  using Number = std::atomic<std::uint64_t>;
  static constexpr std::size_t kStages = kStageCount + 1;  // and none
  static constexpr std::size_t kClasses = 5;

  struct Window {
    std::string rule;
    Number skips{0}, attempts{0}, alerts{0};
    std::atomic<bool> raised{false};
  };

  // One writer, so no lock on the bus.
  static void add(Number* number, std::uint64_t more) {
    number->store(number->load(std::memory_order_relaxed) + more, std::memory_order_relaxed);
  }
  std::uint64_t skips_made() const;

  const std::uint64_t most_total_, most_consecutive_;
  std::vector<std::unique_ptr<Window>> windows_;  // the rate rules, then calibration
  std::array<std::array<Number, kClasses>, kStages> skips_made_{};
  Number updates_{0}, ended_{0}, rollbacks_{0}, incidents_{0}, calibration_skips_{0}, replica_proofs_{0};
  std::array<Number, 2> failed_checkpoints_{};  // could not be written; were not finite
  std::array<Number, 2> bundles_{};             // published; not written
  Number checkpoints_{0}, last_known_good_{0};
  std::atomic<double> last_known_good_at_{0};  // seconds of the steady clock
  Number epoch_{0}, attempt_{0}, update_{0}, skips_{0}, total_{0}, consecutive_{0};
  std::atomic<double> loss_scale_{0}, smallest_scale_{0};  // 0: the loss is not scaled
  std::atomic<bool> running_{true};
  NamedValues watched_, headroom_;
};

}  // namespace holdfast
