// How many attempts were skipped: counted on rank 0, enforced for the whole job.
#pragma once

#include <cstdint>

namespace holdfast {

class Policy;

class SkipBudget {
 public:
  void count_skip() { charge(1); }
  void charge(std::uint64_t skips);
  void count_update() { consecutive_ = 0; }

  // As they were when a run that is resumed ended.
  void restore(std::uint64_t total, std::uint64_t consecutive) {
    total_ = total;
    consecutive_ = consecutive;
  }

  // Whether one more skip would be within the policy.
  bool allows_another(const Policy& policy) const;

  std::uint64_t total() const { return total_; }
  std::uint64_t consecutive() const { return consecutive_; }

 private:
  std::uint64_t total_ = 0;
  std::uint64_t consecutive_ = 0;
};

}  // namespace holdfast
