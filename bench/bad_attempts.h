// Attempts in which some ranks are bad, for the benchmarks of the verdict.
#pragma once

#include <cstdint>
#include <string>

#include "holdfast/step_guard.h"

namespace holdfast::bench {

// Ever so many skips, and no alarm at their rate: what is timed is a single attempt.
inline constexpr const char* kPatientPolicy =
    "max_total_skips: 1000000000 max_consecutive_skips: 1000000000 "
    "rate_rules { name: 'none' window_attempts: 50 max_skips: 50 }";

// Whether `rank` is one of `bad` ranks spread evenly over all; the last one always is.
inline bool is_bad(int rank, int ranks, int bad) {
  const auto before = [&](int r) { return static_cast<std::int64_t>(r) * bad / ranks; };
  return before(rank + 1) > before(rank);
}

// What the scan finds of a gradient with a NaN in it.
inline Probe bad_probe() {
  Probe probe;
  probe.count = 4096;
  probe.bad.nan = 1;
  probe.first_bad = 17;
  return probe;
}

// A guard alone with its collective: no watchdog, no run folder, no tensors.
inline Status make_guard(Collective& collective, std::unique_ptr<StepGuard>* out) {
  GuardOptions options;
  options.policy = kPatientPolicy;
  options.watchdog = false;
  return StepGuard::create(collective, options, out);
}

// Begins an attempt that is ready to be decided.
inline void begin_attempt(StepGuard& guard, bool bad) {
  guard.begin();
  if (bad) guard.observe_measured(Stage::kBackward, "layer0.weight", bad_probe());
}

}  // namespace holdfast::bench
