#include "train/trainer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>

#include "holdfast/coord/policy.h"
#include "holdfast/step_guard.h"
#include "train/digest.h"
#include "train/fashion_mnist.h"
#include "train/fault.h"
#include "train/sampler.h"
#include "train/workload.h"

namespace holdfast::train {
namespace {

// Gradients are reduced in pieces of this many elements, whatever the tensors' sizes.
constexpr std::size_t kBucketElements = std::size_t{1} << 16;

class Trainer {
 public:
  Trainer(const Options& options, MPI_Comm communicator, Collective& collective, Workload& workload,
          const std::vector<Fault>& faults, StepGuard* guard)
      : options_(options),
        communicator_(communicator),
        collective_(collective),
        workload_(workload),
        guard_(guard),
        faults_(faults, collective.rank()),
        sampler_(options.seed, workload.training_samples(), rank(), collective.size(), options.batch,
                 options.accumulate),
        optimizer_(make_optimizer(options.optimizer, workload.parameters().size())),
        data_ends_(options.data_ends(rank())),
        progress_(options.steps, rank() == 0 ? options.progress : Progress::Mode::kOff) {
    share_from_rank_0(workload_.parameters().data(), workload_.parameters().size_bytes());
    ema_.assign(workload_.parameters().begin(), workload_.parameters().end());
    if (guard_ == nullptr) return;
    for (const MutableBuffer& buffer : workload_.buffers()) guard_->protect(buffer.data, buffer.bytes);
  }

  Ending run() {
    for (bool data_left = true; data_left && attempt_ < options_.steps;) {
      const Decision decision = one_attempt();
      if (decision.ends_run()) return abandon(decision);
      data_left = !decision.last_attempt_with_data;
    }
    progress_.finish();
    if (guard_ != nullptr) {
      if (const Decision decision = guard_->close(); decision.ends_run()) return abandon(decision);
    }
    return {};
  }

  // After run(), for every rank that got there in order. Collective.
  void report() {
    print_score();
    if (options_.print_digests) print_digests();
    say(fmt::format("done: {} attempts, {} updates, {} skipped", attempt_, updates_, skips_));
  }

 private:
  int rank() const { return collective_.rank(); }

  // One step, top to bottom. Every rank makes the same sequence of collectives, whatever happens in between:
  // the gradient's all-reduce, decide(), and after APPLY the broadcast of rank 0's buffers.
  Decision one_attempt() {
    begin();
    for (int m = 0; m < options_.accumulate; ++m) micro_batch(m);
    observe_own_gradients();
    reduce_gradients();
    const Decision decision = decide();
    if (decision.apply()) {
      if (omitted()) {
        unpack_buffers(buffers_before_);
      } else {
        update();
      }
    }
    finish(decision);
    return decision;
  }

  void begin() {
    if (guard_ != nullptr) {
      guard_->begin();
      if (data_ends_ > 0 && attempt_ + 1 >= data_ends_) guard_->no_next_batch();
    }
    if (omitted()) buffers_before_ = packed_buffers();
    std::ranges::fill(workload_.gradients(), 0.0f);
    loss_ = 0.0;
    gradient_norm_ = std::nan("");
    if (options_.print_rates) {
      say(fmt::format("rate attempt={} update={} learning_rate={}", attempt_, updates_, learning_rate()));
    }
  }

  void micro_batch(int m) {
    if (guard_ != nullptr) guard_->micro_batch(m);
    const auto corrupt = [&](Stage stage, std::string_view tensor, std::span<float> values) {
      faults_.corrupt(stage, attempt_, m, tensor, values.data(), static_cast<std::int64_t>(values.size()));
    };
    const bool loaded = run_stage(Stage::kInput, m, [&] {
      sampler_.batch(attempt_, m, &sample_ids_);
      workload_.load(sample_ids_, rng_key(options_.seed, rank(), attempt_, m));
      corrupt(Stage::kInput, "input", workload_.input());
    });
    if (loaded) observe(Stage::kInput, "input", workload_.input());

    const bool forwarded = run_stage(Stage::kForward, m, [&] {
      workload_.forward();
      corrupt(Stage::kForward, "output", workload_.output());
    });
    if (forwarded) observe(Stage::kForward, "output", workload_.output());

    const bool judged = run_stage(Stage::kLoss, m, [&] {
      workload_.compute_loss();
      corrupt(Stage::kLoss, "loss", workload_.loss());
    });
    if (judged) observe_loss(workload_.loss()[0]);

    run_stage(Stage::kBackward, m, [&] {
      workload_.backward(1.0f / static_cast<float>(options_.accumulate));
      for (const BucketSlice& slice : workload_.layout())
        corrupt(Stage::kBackward, slice.tensor, values(slice));
    });
  }

  void observe_own_gradients() {
    if (guard_ == nullptr || !guard_->healthy()) return;
    guard_->observe_bucket(Stage::kBackward, TensorView::of(workload_.gradients()), workload_.layout());
  }

  // A rank that failed takes part with zeros.
  void reduce_gradients() {
    run_stage(Stage::kReduction, 0, [] {});
    const std::span<float> gradients = workload_.gradients();
    if (guard_ != nullptr && !guard_->healthy()) std::ranges::fill(gradients, 0.0f);
    for (std::size_t begin = 0; begin < gradients.size(); begin += kBucketElements) {
      const std::size_t count = std::min(kBucketElements, gradients.size() - begin);
      MPI_Allreduce(MPI_IN_PLACE, gradients.data() + begin, static_cast<int>(count), MPI_FLOAT, MPI_SUM,
                    communicator_);
    }
    for (const BucketSlice& slice : workload_.layout()) {
      faults_.corrupt(Stage::kReduction, attempt_, 0, slice.tensor, values(slice).data(), slice.count);
    }
    if (guard_ != nullptr) guard_->observe_share(TensorView::of(gradients), workload_.layout());
  }

  Decision decide() {
    if (guard_ != nullptr) return guard_->decide();
    return {Action::kApply, StatusCode::kOk, {}};
  }

  void update() {
    // The gradients are sums over the ranks; the same bits on each, so the norm is too.
    const double ranks = collective_.size();
    gradient_norm_ = std::sqrt(scan(TensorView::of(workload_.gradients())).sum_of_squares) / ranks;
    const double clip = options_.clip > 0 ? std::min(1.0, options_.clip / (gradient_norm_ + 1e-6)) : 1.0;
    const auto body = [&] {
      faults_.at(Stage::kOptimizer, attempt_, 0);
      optimizer_->step(workload_.parameters(), workload_.gradients(), static_cast<float>(clip / ranks),
                       static_cast<float>(learning_rate()));
      const std::span<const float> parameters = workload_.parameters();
      for (std::size_t i = 0; i < ema_.size(); ++i) {
        ema_[i] = options_.ema_decay * ema_[i] + (1.0f - options_.ema_decay) * parameters[i];
      }
    };
    if (guard_ != nullptr) {
      guard_->update(body);
    } else {
      body();
    }
    std::vector<char> buffers = packed_buffers();
    share_from_rank_0(buffers.data(), buffers.size());
    unpack_buffers(buffers);
    ++updates_;
  }

  void finish(const Decision& decision) {
    if (guard_ != nullptr) guard_->finish();
    if (decision.action == Action::kSkip) {
      ++skips_;
      progress_.note(fmt::format("attempt {} skipped by all ranks: {}", attempt_, decision.reason));
    }
    if (decision.last_attempt_with_data && attempt_ + 1 < options_.steps) {
      progress_.note(fmt::format("a rank has no more data: all ranks stop after attempt {}", attempt_));
    }
    progress_.report(attempt_, updates_, skips_, loss_, gradient_norm_);
    ++attempt_;
  }

  Ending abandon(const Decision& decision) {
    progress_.finish();
    const std::string where = fmt::format("{} after {} attempts", action_name(decision.action), attempt_);
    // When the ranks could not be told together, each speaks for itself.
    if (rank() == 0 || !decision.agreed) {
      fmt::print(stderr, "guarded_train: rank {}: {}: {}. Exit code {}.{}\n", rank(), where, decision.reason,
                 decision.exit_code(),
                 guard_ != nullptr ? " The record is in " + options_.run_dir + "/events.jsonl." : "");
    }
    return {decision.status(), decision.agreed};
  }

  // Runs one stage of a micro-batch with the faults that are due in it. Under the guard an exception becomes
  // a flag, and the rest of this rank's attempt is left out.
  template <typename Body>
  bool run_stage(Stage stage, int micro, Body&& body) {
    const auto guarded = [&] {
      faults_.at(stage, attempt_, micro);
      body();
    };
    if (guard_ != nullptr) return guard_->run(stage, guarded);
    guarded();
    return true;
  }

  void observe(Stage stage, std::string_view tensor, std::span<const float> elements) {
    if (guard_ != nullptr) guard_->observe(stage, tensor, TensorView::of(elements));
  }

  void observe_loss(float loss) {
    loss_ += static_cast<double>(loss) / options_.accumulate;
    if (guard_ != nullptr) guard_->observe_loss(static_cast<double>(loss));
  }

  bool omitted() const { return std::ranges::count(options_.omitted_updates, attempt_) != 0; }
  double learning_rate() const { return options_.schedule.rate(updates_); }

  std::span<float> values(const BucketSlice& slice) {
    return workload_.gradients().subspan(static_cast<std::size_t>(slice.offset),
                                         static_cast<std::size_t>(slice.count));
  }

  void share_from_rank_0(void* data, std::size_t bytes) {
    MPI_Bcast(data, static_cast<int>(bytes), MPI_BYTE, 0, communicator_);
  }

  std::vector<char> packed_buffers() const {
    std::vector<char> packed;
    for (const MutableBuffer& buffer : workload_.buffers()) {
      const char* data = static_cast<const char*>(buffer.data);
      packed.insert(packed.end(), data, data + buffer.bytes);
    }
    return packed;
  }

  void unpack_buffers(const std::vector<char>& packed) {
    const char* from = packed.data();
    for (const MutableBuffer& buffer : workload_.buffers()) {
      std::memcpy(buffer.data, from, buffer.bytes);
      from += buffer.bytes;
    }
  }

  // Each rank takes its part of the test samples.
  void print_score() {
    const std::int64_t all = workload_.test_samples();
    const std::int64_t wanted = options_.evaluate < 0 ? all : std::min(all, options_.evaluate);
    const Probe weights = scan(TensorView::of(workload_.parameters()));
    Score score =
        workload_.evaluate(wanted * rank() / collective_.size(), wanted * (rank() + 1) / collective_.size());
    std::int64_t counts[2] = {score.correct, score.total};
    MPI_Allreduce(MPI_IN_PLACE, counts, 2, MPI_INT64_T, MPI_SUM, communicator_);
    if (counts[1] > 0) {
      say(fmt::format("test accuracy {:.4f} ({} of {} images)",
                      static_cast<double>(counts[0]) / static_cast<double>(counts[1]), counts[0], counts[1]));
    }
    say(fmt::format("parameters total={} non_finite={}", weights.count, weights.bad.total()));
  }

  void print_digests() {
    Digest parameters;
    parameters.add(workload_.parameters());
    Digest optimizer;
    for (const auto& piece : optimizer_->state()) optimizer.add(piece);
    const std::uint64_t steps = optimizer_->steps();
    optimizer.add(&steps, sizeof(steps));
    Digest ema;
    ema.add(ema_);
    Digest buffers;
    const std::vector<char> packed = packed_buffers();
    buffers.add(packed.data(), packed.size());
    Digest rng;
    const std::string rng_state = workload_.rng_state();
    rng.add(rng_state.data(), rng_state.size());

    std::vector<Bytes> lines;
    const Status gathered = collective_.gather(
        fmt::format(
            "digest rank={} parameters={} optimizer={} ema={} buffers={} rng={} attempts={} updates={}",
            rank(), parameters.hex(), optimizer.hex(), ema.hex(), buffers.hex(), rng.hex(), attempt_,
            updates_),
        &lines);
    if (!gathered.ok()) throw std::runtime_error(gathered.to_string());
    for (const Bytes& line : lines) say(line);
  }

  void say(const std::string& line) {
    if (rank() == 0) fmt::print("{}\n", line);
  }

  const Options& options_;
  const MPI_Comm communicator_;
  Collective& collective_;
  Workload& workload_;
  StepGuard* const guard_;  // null with --guard off
  const FaultInjector faults_;
  Sampler sampler_;
  const std::unique_ptr<Optimizer> optimizer_;
  const std::uint64_t data_ends_;  // this rank has batches for so many attempts; 0 for ever
  Progress progress_;

  std::vector<float> ema_;
  std::uint64_t attempt_ = 0;
  std::uint64_t updates_ = 0;
  std::uint64_t skips_ = 0;

  // Of the running attempt.
  double loss_ = 0.0;
  double gradient_norm_ = 0.0;
  std::vector<std::int64_t> sample_ids_;
  std::vector<char> buffers_before_;  // when its update is to be omitted
};

FaultSurface fault_surface(const Options& options, Workload& workload, int world_size) {
  FaultSurface surface;
  const auto at = [&](Stage stage) -> auto& { return surface.tensors[static_cast<std::size_t>(stage)]; };
  at(Stage::kInput) = {{"input", workload.input_elements(options.batch)}};
  at(Stage::kForward) = {{"output", workload.output_elements(options.batch)}};
  at(Stage::kLoss) = {{"loss", 1}};
  for (const BucketSlice& slice : workload.layout()) {
    at(Stage::kBackward).emplace_back(slice.tensor, slice.count);
    at(Stage::kReduction).emplace_back(slice.tensor, slice.count);
  }
  surface.micro_batches = options.accumulate;
  surface.world_size = world_size;
  surface.attempts = options.steps;
  return surface;
}

Status parse_faults(const Options& options, Workload& workload, int world_size, std::vector<Fault>* faults) {
  const FaultSurface surface = fault_surface(options, workload, world_size);
  for (const std::string& spec : options.faults) {
    Fault fault;
    if (Status s = parse_fault(spec, &fault); !s.ok()) return s;
    if (Status s = resolve_fault(surface, &fault); !s.ok()) return s;
    faults->push_back(fault);
  }
  return Status();
}

// What can go wrong before the first step, on this rank.
struct Preparation {
  std::unique_ptr<Workload> workload;
  std::vector<Fault> faults;
  std::string policy;
};

Status prepare(const Options& options, int world_size, Preparation* out) {
  if (Status s = read_policy_file(options.policy_file, &out->policy); !s.ok()) return s;
  if (Status s = make_fashion_mnist(options.data.front(), options.seed, &out->workload); !s.ok()) return s;
  if (Status s =
          check_sampler(out->workload->training_samples(), world_size, options.batch, options.accumulate);
      !s.ok()) {
    return s;
  }
  return parse_faults(options, *out->workload, world_size, &out->faults);
}

void print_start(const Options& options, int world_size, const StepGuard* guard) {
  fmt::print("guarded_train: {} on {} rank{}, {} attempts of {} x {} samples, {}\n", options.workload,
             world_size, world_size == 1 ? "" : "s", options.steps, world_size * options.accumulate,
             options.batch, options.optimizer.name);
  if (guard == nullptr) {
    fmt::print("guard: OFF, a non-finite value will reach the weights\n");
    return;
  }
  fmt::print("{}run folder: {}\npolicy:\n{}", guard->topology_map(), options.run_dir, guard->policy_text());
}

Ending refuse(const Status& status, int rank) {
  if (rank == 0) fmt::print(stderr, "guarded_train: {}. Nothing was trained.\n", status.message());
  return {status};
}

}  // namespace

Ending train(const Options& options, const Status& parsed, MPI_Comm communicator, Collective& collective) {
  Preparation prepared;
  const Status mine = parsed.ok() ? prepare(options, collective.size(), &prepared) : parsed;
  if (Status s = agree_on_status(collective, mine); !s.ok()) return refuse(s, collective.rank());

  std::unique_ptr<StepGuard> guard;
  if (options.guard) {
    GuardOptions guard_options;
    guard_options.policy = prepared.policy;
    guard_options.run_dir = options.run_dir;
    guard_options.expected_ranks = options.expected_ranks;
    if (Status s = StepGuard::create(collective, guard_options, &guard); !s.ok()) {
      return refuse(s, collective.rank());
    }
  }
  if (guard) {
    if (Status s = guard->agree_on_layout(prepared.workload->layout()); !s.ok()) return refuse(s, collective.rank());
  }
  if (collective.rank() == 0) print_start(options, collective.size(), guard.get());
  Trainer trainer(options, communicator, collective, *prepared.workload, prepared.faults, guard.get());
  const Ending ending = trainer.run();
  guard.reset();  // an evaluation takes as long as it takes
  if (ending.status.ok()) trainer.report();
  return ending;
}

}  // namespace holdfast::train
