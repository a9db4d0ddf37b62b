#include "train/recorded_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <limits>
#include <memory>
#include <sstream>

#include "train/incident_evidence.h"
#include "train/prepare.h"

namespace holdfast::train {
namespace {

constexpr int kMostMicroBatches = 1024;

std::vector<std::string> lines(const std::string& text) {
  std::vector<std::string> all;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find('\n', at), text.size());
    all.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return all;
}

template <typename Number>
bool parse_whole(const std::string& text, Number* value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
  return error == std::errc() && end == text.data() + text.size();
}

Status read_options(const RecordedAttempt& attempt, RecordedRun* run) {
  const auto text = [&](const char* name) { return configured(attempt, name); };
  run->options.workload = text("workload");
  run->options.data.clear();  // the batch is recorded
  run->options.precision = run->settings.precision.value_or(text("precision"));
  run->options.optimizer.name = text("optimizer");
  const bool known = (run->options.workload == "fashion-mnist" || run->options.workload == "gpt") &&
                     (run->options.optimizer.name == "sgd" || run->options.optimizer.name == "adamw") &&
                     parse_whole(text("batch_size"), &run->options.batch) &&
                     parse_whole(text("micro_batches"), &run->options.accumulate) &&
                     parse_whole(text("seed"), &run->options.seed);
  if (!known) return Status::usage("a configuration of this program");
  for (auto [name, to] : {std::pair{"momentum", &run->options.optimizer.momentum},
                          {"beta1", &run->options.optimizer.beta1},
                          {"beta2", &run->options.optimizer.beta2},
                          {"eps", &run->options.optimizer.eps},
                          {"weight_decay", &run->options.optimizer.weight_decay}}) {
    double value = 0;
    if (!parse_exact(text(name), &value)) return Status::usage(std::string("the configuration's ") + name);
    *to = static_cast<float>(value);
  }
  if (run->settings.eps) run->options.optimizer.eps = static_cast<float>(*run->settings.eps);
  return Status();
}

bool read_ids(const RecordedAttempt& attempt, int micro_batch, std::int64_t below,
              std::vector<std::int64_t>* ids) {
  const std::string* text = attempt.fact(samples_fact(micro_batch));
  if (text == nullptr) return false;
  std::istringstream all(*text);
  for (std::string word; std::getline(all, word, ',');) {
    std::int64_t id = 0;
    if (!parse_whole(word, &id) || id < 0 || id >= below) return false;
    ids->push_back(id);
  }
  return !ids->empty();
}

}  // namespace

std::string configured(const RecordedAttempt& attempt, const std::string& name) {
  const auto found = attempt.configuration.find(name);
  return found == attempt.configuration.end() ? "" : found->second;
}

bool read_number(const RecordedAttempt& attempt, std::string_view name, double* value) {
  const std::string* text = attempt.fact(name);
  return text != nullptr && parse_exact(*text, value);
}

Status read_plan(const RecordedAttempt& attempt, RecordedRun* run) {
  run->plan.attempt = attempt.subject.attempt;
  run->plan.rank = attempt.rank;
  run->plan.loss_scale = run->settings.loss_scale.value_or(attempt.loss_scale);
  if (!read_number(attempt, fact::kDenominator, &run->plan.denominator))
    return Status::usage("the denominator of the loss");
  int micro_batches = 0;
  for (const RecordedTensor& tensor : attempt.batch) {
    if (tensor.micro_batch < kMostMicroBatches)
      micro_batches = std::max(micro_batches, tensor.micro_batch + 1);
  }
  if (run->options.accumulate < 1 || run->options.accumulate > kMostMicroBatches)
    return Status::usage("a number of micro-batches that this program takes");
  if (!attempt.batch.empty() && micro_batches != run->options.accumulate) {
    return Status::usage(
        fmt::format("the batch of {} micro-batches: there are {}", run->options.accumulate, micro_batches));
  }
  for (int m = 0; m < run->options.accumulate; ++m) {
    std::uint64_t key = 0;
    const std::string* text = attempt.fact(std::string(fact::kRngKey) + std::to_string(m));
    if (text == nullptr || !parse_whole(*text, &key))
      return Status::usage("the random numbers' key of micro-batch " + std::to_string(m));
    run->plan.rng_keys.push_back(key);
  }
  run->plan.samples.resize(run->plan.rng_keys.size());
  return Status();
}

void put_batch(const RecordedAttempt& attempt, AttemptPlan* plan) {
  plan->recorded.assign(plan->rng_keys.size(), {});
  for (const RecordedTensor& tensor : attempt.batch) {
    if (tensor.micro_batch >= 0 && tensor.micro_batch < std::ssize(plan->recorded))
      plan->recorded[static_cast<std::size_t>(tensor.micro_batch)].push_back(tensor);
  }
}

Status read_run(const RecordedAttempt& attempt, RecordedRun* run) {
  *run = {};
  if (Status s = parse_replay_settings(attempt.settings, &run->settings); !s.ok()) return s;
  if (Status s = read_options(attempt, run); !s.ok()) return s;
  return read_plan(attempt, run);
}

Status read_faults(const RecordedAttempt& attempt, Workload& workload, RecordedRun* run) {
  run->faults.clear();
  run->natural_faults.clear();
  for (const std::string& text : lines(configured(attempt, "natural_faults"))) {
    NaturalFaultSpec spec;
    if (Status s = parse_natural_fault_spec(text, &spec); !s.ok()) return s;
    if (run->settings.natural_faults) {
      run->natural_faults.push_back(std::move(spec));
    } else if (spec.sum_overflow() && spec.due(run->plan.rank, run->plan.attempt, spec.micro)) {
      run->sum_overflow_off = true;
    }
  }
  if (!run->settings.injected) return Status();
  const FaultSurface surface = fault_surface(run->options, workload, static_cast<int>(attempt.ranks),
                                             std::numeric_limits<std::uint64_t>::max());
  for (const std::string& text : lines(configured(attempt, "faults"))) {
    Fault fault;
    if (Status s = parse_fault(text, &fault); !s.ok()) return s;
    if (Status s = resolve_fault(surface, &fault); !s.ok()) return s;
    const bool hits = !fault.rank || *fault.rank == attempt.rank;
    if (hits && !fault.transient && (fault.kind == Fault::Kind::kValue || fault.kind == Fault::Kind::kThrow))
      run->faults.push_back(fault);
  }
  return Status();
}

Status load_batch(const std::vector<std::string>& data, RecordedAttempt* attempt) {
  RecordedRun run;
  std::unique_ptr<Workload> workload;
  if (Status s = read_run(*attempt, &run); !s.ok()) return s;
  run.options.data = data;
  if (Status s = make_workload(run.options, &workload); !s.ok()) return s;
  if (Status s = read_faults(*attempt, *workload, &run); !s.ok()) return s;
  const FaultInjector none({}, attempt->rank);
  LocalAttempt local(*workload, none, run.natural_faults);
  for (int m = 0; m < run.options.accumulate; ++m) {
    std::vector<std::int64_t>& ids = run.plan.samples[static_cast<std::size_t>(m)];
    if (!read_ids(*attempt, m, workload->training_samples(), &ids))
      return Status::usage("the sample ids of micro-batch " + std::to_string(m) +
                           ", as this data set has them");
    local.set_natural_faults(run.plan, m, true);
    local.load(run.plan, m);
    for (const BatchTensor& tensor : workload->batch_tensors()) {
      const auto* bytes = static_cast<const char*>(tensor.view.data);
      const auto size = static_cast<std::size_t>(tensor.view.element_count * dtype_size(tensor.view.dtype));
      attempt->batch.push_back({tensor.name, tensor.view.dtype, tensor.shape, Bytes(bytes, size), m});
    }
    local.set_natural_faults(run.plan, m, false);
  }
  return Status();
}

}  // namespace holdfast::train
