// The policy's rate rules: alarms on how often attempts are skipped.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "holdfast/collectives/record.h"
#include "holdfast/coord/rate_window.h"

namespace holdfast {

class Policy;
struct Incident;

// The name under which the rate of calibration skips raises its alert, see Policy.LossScale.
inline constexpr std::string_view kCalibrationRule = "calibration_rate";

// Skips remembered, for the windows and for what they had in common: the newest. A rule fires below that.
inline constexpr std::uint64_t kMostSkipsOfRule = 4095;
inline constexpr std::size_t kMostSkipsRemembered = kMostSkipsOfRule + 1;

// What is remembered of one skip.
struct SkipRecord {
  std::uint64_t attempt = 0;   // in the order made, see RateWindow
  std::optional<Stage> stage;  // none for a rule that fired
  int rank = -1;               // the origin, and so the data shard; -1: several, or not one rank's own making
  std::string host;            // of that rank
  std::string tensor;          // the first origin's

  bool operator==(const SkipRecord&) const = default;
};
SkipRecord skip_record(const Incident& incident);  // but for `attempt`, which RateRules knows

// The value that most skips had, "" for none, and how many had it.
struct MostFrequent {
  std::string value;
  std::uint64_t skips = 0;
};

// What skips have in common.
struct SkipProfile {
  std::uint64_t skips = 0;
  MostFrequent stage, rank, host, tensor;
};

// An alert that was raised or cleared.
struct RateChange {
  std::string rule;
  bool raised = false;
  std::uint64_t skips = 0;     // in the window
  std::uint64_t attempts = 0;  // in the window
  std::uint64_t window_attempts = 0;
  std::uint64_t max_skips = 0;
  SkipProfile in_window;
  SkipProfile before;  // of the remembered skips that have left the window

  double fraction() const;
  // Which of "stage", "rank", "host", "tensor" is another one in the window than before; none when there is
  // nothing before to compare with.
  std::vector<std::string> changed() const;
};

// Rank 0's. Not thread-safe.
class RateRules {
 public:
  explicit RateRules(const Policy& policy);

  // Each attempt, clean or not, before anything else of it. O(number of rules), allocates nothing.
  void count_attempt();
  std::uint64_t attempts() const { return attempts_; }

  // By which rule, if any, one more skip, in the running attempt, is one too many: it ends the run, or goes
  // back.
  struct Broken {
    std::string why;
    bool rolls_back = false;
  };
  std::optional<Broken> broken_by_a_skip() const;

  // The running attempt is skipped.
  void count_skip(SkipRecord skip);
  // The same, for one that may turn out to be calibration. Settled together: dropped, or counted where they
  // were.
  void count_pending(SkipRecord skip);
  void settle_pending(bool charged);

  // Gives the next alert that is raised or cleared now; call until there is none. Allocates only when there
  // is.
  std::optional<RateChange> next_change();
  std::vector<std::string> raised() const;  // names of the rules

  // How full a rule's window is.
  struct Window {
    std::uint64_t skips = 0;
    std::uint64_t attempts = 0;
    bool raised = false;
  };
  std::vector<std::string> names() const;
  std::size_t size() const { return rules_.size(); }
  Window window(std::size_t rule) const;  // in the order of names(); O(1), allocates nothing

  // All that the above depends on, for the run's memory.
  const std::deque<SkipRecord>& skips() const { return skips_; }  // oldest first
  const std::deque<SkipRecord>& pending() const { return pending_; }
  void restore(std::uint64_t attempts, std::deque<SkipRecord> skips, std::deque<SkipRecord> pending,
               const std::vector<std::string>& raised);

 private:
  struct Rule {
    std::string name;
    std::uint64_t window_attempts;
    std::uint64_t max_skips;
    std::uint64_t least_attempts;
    bool forbids_skips;  // ABORT or ROLL_BACK
    bool rolls_back;
    RateWindow window;
    bool raised = false;
  };
  void remember(SkipRecord skip);
  RateChange change_of(const Rule& rule) const;

  std::vector<Rule> rules_;
  std::uint64_t attempts_ = 0;
  std::deque<SkipRecord> skips_;
  std::deque<SkipRecord> pending_;
};

}  // namespace holdfast
