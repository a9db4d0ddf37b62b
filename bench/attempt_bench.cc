// What a clean attempt costs a rank beside the scan and the all-reduce: records, verdict, counters; with the
// watchdog's bookkeeping and without, in the same run. One rank, so that no time is spent waiting for others.
#include <benchmark/benchmark.h>

#include <memory>
#include <string>
#include <vector>

#include "holdfast/step_guard.h"

namespace {

using holdfast::BucketSlice;
using holdfast::Collective;
using holdfast::GuardOptions;
using holdfast::StepGuard;
using holdfast::TensorView;

// A collective of one rank that does nothing: what is left is the guard itself.
class AloneCollective final : public Collective {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  holdfast::Status reduce(holdfast::Record&) override { return {}; }
  using Collective::gather;
  holdfast::Status gather(const holdfast::Bytes& mine, std::vector<holdfast::Bytes>* all, int) override {
    all->assign(1, mine);
    return {};
  }
  holdfast::Status broadcast(holdfast::Bytes*) override { return {}; }
};

void clean_attempt(benchmark::State& state, bool watchdog) {
  AloneCollective alone;
  GuardOptions options;
  options.watchdog = watchdog;
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

}  // namespace

BENCHMARK_CAPTURE(clean_attempt, without_watchdog, false)->Arg(1)->Arg(100);
BENCHMARK_CAPTURE(clean_attempt, with_watchdog, true)->Arg(1)->Arg(100);

BENCHMARK_MAIN();
