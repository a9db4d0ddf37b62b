#include "train/prepare.h"

#include <charconv>
#include <system_error>

#include "holdfast/coord/policy.h"
#include "train/fashion_mnist.h"
#include "train/gpt.h"
#include "train/sampler.h"

namespace holdfast::train {
namespace {

Status check_natural_fault(const Options& options, const Workload& workload, int world_size,
                           const NaturalFaultSpec& spec) {
  const auto refuse = [&](const std::string& why) {
    return Status::usage("--fault " + spec.text + ": " + why);
  };
  if (spec.micro >= options.accumulate)
    return refuse("there are " + std::to_string(options.accumulate) + " micro-batches");
  if (spec.rank && *spec.rank >= world_size)
    return refuse("there are " + std::to_string(world_size) + " ranks");
  if (spec.every == 0 && spec.attempt >= options.steps) {
    return refuse("the last attempt is " + std::to_string(options.steps - 1));
  }
  if (spec.sum_overflow()) return world_size > 1 ? Status() : refuse("a sum takes at least two ranks");
  if (!workload.supports(*spec.fault))
    return refuse("workload " + options.workload + " does not have this fault");
  if (spec.fault == NaturalFault::kDeadUnit &&
      (options.optimizer.name != "adamw" || options.optimizer.eps != 0)) {
    return refuse("does no harm without --optimizer adamw --eps 0");
  }
  return Status();
}

// Of RANK=ATTEMPTS the command line has looked at the form only.
Status check_data_ends(const Options& options, int world_size) {
  for (const std::string& text : options.uneven_data) {
    int rank = 0;
    const auto parsed = std::from_chars(text.data(), text.data() + text.size(), rank);
    if (parsed.ec != std::errc() || rank >= world_size) {
      return Status::usage("--data-ends " + text + ": there are " + std::to_string(world_size) +
                           " ranks, numbered from 0");
    }
  }
  return Status();
}

}  // namespace

Status make_workload(const Options& options, std::unique_ptr<Workload>* out) {
  if (options.workload == "gpt") return make_gpt(options.data, options.seed, GptOptions(), out);
  return make_fashion_mnist(options.data.empty() ? "" : options.data.front(), options.seed, out);
}

FaultSurface fault_surface(const Options& options, Workload& workload, int world_size,
                           std::uint64_t attempts) {
  FaultSurface surface;
  const auto at = [&](Stage stage) -> auto& { return surface.tensors[static_cast<std::size_t>(stage)]; };
  at(Stage::kInput) = {{"input", workload.input_elements(options.batch)}};
  at(Stage::kForward) = {{"output", workload.output_elements(options.batch)}};
  at(Stage::kLoss) = {{"loss", 1}};
  for (const BucketSlice& slice : workload.layout()) {
    for (const Stage stage : {Stage::kBackward, Stage::kReduction, Stage::kOptimizer}) {
      at(stage).emplace_back(slice.tensor, slice.count);
    }
  }
  surface.micro_batches = options.accumulate;
  surface.world_size = world_size;
  surface.attempts = attempts;
  return surface;
}

Status prepare(const Options& options, int world_size, Preparation* out) {
  if (Status s = read_policy_file(options.policy_file, &out->policy); !s.ok()) return s;
  if (Status s = make_workload(options, &out->workload); !s.ok()) return s;
  Workload& workload = *out->workload;
  if (Status s = check_sampler(workload.training_samples(), world_size, options.batch, options.accumulate);
      !s.ok()) {
    return s;
  }
  if (Status s = check_data_ends(options, world_size); !s.ok()) return s;
  const FaultSurface surface = fault_surface(options, workload, world_size, options.steps);
  for (const std::string& text : options.faults) {
    Fault fault;
    if (Status s = parse_fault(text, &fault); !s.ok()) return s;
    if (Status s = resolve_fault(surface, &fault); !s.ok()) return s;
    out->faults.push_back(fault);
  }
  for (const std::string& text : options.natural_faults) {
    NaturalFaultSpec spec;
    if (Status s = parse_natural_fault_spec(text, &spec); !s.ok()) return s;
    if (Status s = check_natural_fault(options, workload, world_size, spec); !s.ok()) return s;
    if (spec.fault == NaturalFault::kDeadUnit) workload.set_fault(NaturalFault::kDeadUnit, true);
    out->natural_faults.push_back(spec);
  }
  return Status();
}

}  // namespace holdfast::train
