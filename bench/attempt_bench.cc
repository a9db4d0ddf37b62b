// What a clean attempt costs rank 0 beside the scan and the all-reduce: records, verdict, counters; with the
// watchdog's bookkeeping and without, with the record of the run and without, in the same run. One rank, so
// that no time is spent waiting for others.
#include <benchmark/benchmark.h>

#include <memory>
#include <string>
#include <vector>

#include "alone.h"
#include "holdfast/coord/metrics.h"
#include "holdfast/step_guard.h"

namespace {

using holdfast::BucketSlice;
using holdfast::GuardOptions;
using holdfast::StepGuard;
using holdfast::TensorView;
using holdfast::bench::AloneCollective;
using holdfast::bench::RunDir;

constexpr const char* kNoStateWrites = "state_interval_attempts: 1000000000";

// `recorded`: events, state, and the thread that writes metrics and status and looks for a stop; and the
// endpoint.
void clean_attempt(benchmark::State& state, bool watchdog, bool recorded, const char* policy) {
  AloneCollective alone;
  const RunDir run_dir;
  GuardOptions options;
  options.policy = policy;
  options.watchdog = watchdog;
  if (recorded) {
    options.run_dir = run_dir.path();
    options.metrics_port = 0;
  }
  std::unique_ptr<StepGuard> guard;
  if (const holdfast::Status s = StepGuard::create(alone, options, &guard); !s.ok()) {
    state.SkipWithError(s.to_string().c_str());
    return;
  }
  const auto tensors = static_cast<std::size_t>(state.range(0));
  constexpr std::int64_t kElements = 16;  // next to nothing to scan
  const std::vector<float> gradients(tensors * kElements, 1.0f);
  std::vector<std::string> names;
  for (std::size_t t = 0; t < tensors; ++t) names.push_back("tensor" + std::to_string(t));
  std::vector<BucketSlice> layout;
  for (std::size_t t = 0; t < tensors; ++t) {
    layout.push_back({names[t], static_cast<std::int64_t>(t) * kElements, kElements});
  }
  for (auto _ : state) {
    guard->begin();
    guard->observe_bucket(holdfast::Stage::kBackward, TensorView::of(gradients), layout);
    const holdfast::Decision decision = guard->decide();
    if (!decision.apply()) state.SkipWithError("a clean attempt was not applied");
    guard->finish();
  }
  if (guard->updates() != static_cast<std::uint64_t>(state.iterations()))
    state.SkipWithError("updates were lost");
}

// What the coordinator does for the metrics in it, with the two default rate rules.
void metrics_of_a_clean_attempt(benchmark::State& state) {
  holdfast::RunMetrics metrics({"burst", "creep"}, 100, 10);
  std::uint64_t attempts = 0;
  for (auto _ : state) {
    metrics.set_watched("gradient_norm", static_cast<double>(attempts));
    metrics.set_watched("loss", static_cast<double>(attempts));
    metrics.set_headroom("gradient", 0.1);
    metrics.count_update();
    ++attempts;
    metrics.set_position(1, attempts, attempts, 0);
    metrics.set_skips_charged(0, 0);
    for (const std::size_t rule : {0u, 1u}) metrics.set_window(rule, 0, attempts, false);
    metrics.set_calibration_alert(false);
  }
  if (metrics.position().attempts_made != attempts) state.SkipWithError("attempts were lost");
}

}  // namespace

BENCHMARK_CAPTURE(clean_attempt, without_watchdog, false, false, "")->Arg(1)->Arg(100);
BENCHMARK_CAPTURE(clean_attempt, with_watchdog, true, false, "")->Arg(1)->Arg(100);
BENCHMARK_CAPTURE(clean_attempt, control, true, false, "")->Arg(1)->Arg(100);
BENCHMARK_CAPTURE(clean_attempt, with_record, true, true, kNoStateWrites)->Arg(1)->Arg(100);
BENCHMARK_CAPTURE(clean_attempt, with_record_and_state, true, true, "")->Arg(1)->Arg(100);
BENCHMARK(metrics_of_a_clean_attempt);

BENCHMARK_MAIN();
