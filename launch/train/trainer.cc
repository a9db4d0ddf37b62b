#include "train/trainer.h"

#include <fmt/format.h>

#include <memory>

#include "holdfast/step_guard.h"
#include "train/prepare.h"
#include "train/stop_signals.h"
#include "train/training_loop.h"

namespace holdfast::train {
namespace {

void print_start(const Options& options, int world_size, const StepGuard* guard) {
  fmt::print("guarded_train: {} on {} rank{}, {} attempts of {} x {} samples, {}, gradients in {}\n",
             options.workload, world_size, world_size == 1 ? "" : "s", options.steps,
             world_size * options.accumulate, options.batch, options.optimizer.name, options.precision);
  if (guard == nullptr) {
    fmt::print("guard: OFF, a non-finite value will reach the weights\n");
    return;
  }
  fmt::print("{}run folder: {}\npolicy:\n{}", guard->topology_map(), options.run_dir, guard->policy_text());
  if (const std::string url = guard->metrics_url(); !url.empty()) fmt::print("metrics: {}\n", url);
  if (guard->epoch() > 1) {
    fmt::print("resumed: epoch {}, attempt {}, {} updates, {} skips so far\n", guard->epoch(),
               guard->attempt(), guard->updates(), guard->skips());
    if (const std::string& from = guard->restored_from(); !from.empty()) {
      fmt::print("restored: {}\n", from);
    } else {
      fmt::print("no checkpoint: weights start anew\n");
    }
  } else if (options.resume) {
    fmt::print("nothing to resume in {}: a new run\n", options.run_dir);
  }
}

Ending refuse(const Status& status, int rank) {
  if (rank == 0) fmt::print(stderr, "guarded_train: {}. Nothing was trained.\n", status.message());
  return {status};
}

}  // namespace

Status make_guard(const Options& options, const Preparation& prepared, Collective& collective,
                  std::unique_ptr<StepGuard>* out) {
  if (!options.guard) return Status();
  GuardOptions guard_options;
  guard_options.policy = prepared.policy;
  guard_options.run_dir = options.run_dir;
  guard_options.resume = options.resume;
  guard_options.expected_ranks = options.expected_ranks;
  guard_options.loss_scaling = options.scales_loss();
  guard_options.asked_to_end = asked_to_end;
  guard_options.checkpoints = options.checkpoints;
  guard_options.metrics_port = options.metrics_port;
  guard_options.metrics_address = options.metrics_address;
  if (Status s = StepGuard::create(collective, guard_options, out); !s.ok()) return s;
  return (*out)->agree_on_layout(prepared.workload->layout());
}

Ending train(const Options& options, const Status& parsed, MPI_Comm communicator, Collective& collective) {
  Preparation prepared;
  const Status mine = parsed.ok() ? prepare(options, collective.size(), &prepared) : parsed;
  if (Status s = agree_on_status(collective, mine); !s.ok()) return refuse(s, collective.rank());

  std::unique_ptr<StepGuard> guard;
  if (Status s = make_guard(options, prepared, collective, &guard); !s.ok())
    return refuse(s, collective.rank());
  TrainingLoop loop(options, communicator, collective, prepared, guard.get());
  // Whatever happens, the guard goes first: it reads what the loop holds.
  const auto release = [&](StepGuard*) { guard.reset(); };
  const std::unique_ptr<StepGuard, decltype(release)> guard_first(guard.get(), release);
  if (Status s = loop.register_state(); !s.ok()) return refuse(s, collective.rank());
  if (collective.rank() == 0) print_start(options, collective.size(), guard.get());
  if (guard) install_stop_signals();
  const Ending ending = loop.run();
  guard.reset();  // an evaluation takes as long as it takes
  if (ending.status.ok()) loop.report();
  return ending;
}

}  // namespace holdfast::train
