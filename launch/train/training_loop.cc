#include "train/training_loop.h"

#include <bit>
#include <cmath>
#include <stdexcept>

#include "train/incident_evidence.h"
#include "train/stop_signals.h"

namespace holdfast::train {

TrainingLoop::TrainingLoop(const Options& options, MPI_Comm communicator, Collective& collective,
                           Preparation& prepared, StepGuard* guard)
    : options_(options),
      communicator_(communicator),
      collective_(collective),
      workload_(*prepared.workload),
      guard_(guard),
      tap_(guard),
      faults_(prepared.faults, collective.rank()),
      natural_faults_(prepared.natural_faults),
      local_(workload_, faults_, natural_faults_),
      sampler_(options.seed, workload_.training_samples(), rank(), collective.size(), options.batch,
               options.accumulate),
      rank_0_sampler_(options.seed, workload_.training_samples(), 0, collective.size(), options.batch,
                      options.accumulate),
      data_ends_(options.data_ends(rank())),
      replica_(options, workload_, communicator),
      bucket_(workload_.gradients(), options.dtype(), communicator),
      progress_(options.steps, rank() == 0 ? options.progress : Progress::Mode::kOff) {
  if (guard_ == nullptr) return;
  take_position();
  if (rank() == 0) keep_ledger();
  guard_->provide_evidence(
      evidence_providers(options_, collective_.size(), prepared, local_, plan_, update_scale_));
  for (const MutableBuffer& buffer : workload_.buffers()) {
    if (buffer.is_fp32) {
      guard_->protect(buffer.name, buffer.data, DType::kFloat32,
                      static_cast<std::int64_t>(buffer.bytes / sizeof(float)));
    } else {
      guard_->protect(buffer.data, buffer.bytes);
    }
  }
}

Status TrainingLoop::register_state() {
  if (guard_ == nullptr) return Status();
  if (Status s = guard_->register_state(replica_.training_state()); !s.ok()) return s;
  take_position();
  return Status();
}

Ending TrainingLoop::run() {
  for (bool closed = false; !closed;) {
    for (bool data_left = all_have_data(); data_left && attempt_ < options_.steps;) {
      if (options_.print_timing) times_.begin();
      const Decision decision = attempt();
      if (options_.print_timing) times_.end();
      if (decision.ends_run()) return abandon(decision);
      data_left = decision.rolls_back() ? all_have_data() : !decision.last_attempt_with_data;
    }
    progress_.finish();
    if (guard_ == nullptr) return {};
    Decision decision = guard_->close();
    closed = decision.apply();
    if (decision.rolls_back()) decision = go_back(decision);
    if (decision.ends_run()) return abandon(decision);
  }
  return {};
}

void TrainingLoop::report() {
  print_score();
  if (options_.print_digests) print_digests();
  if (options_.print_timing) say(times_.describe());
  say(fmt::format("done: {} attempts, {} updates, {} skipped", attempt_, replica_.updates(), skips_));
}

// Where the run is: at 0, or where the checkpoint was that was loaded. The data go on there, and so does
// the schedule.
void TrainingLoop::take_position() {
  attempt_ = guard_->attempt();
  skips_ = guard_->skips();
  replica_.set_updates(guard_->updates());
  faults_.set_epoch(guard_->epoch());
}

// Collective, after ROLL_BACK. Gives a decision that ends the run when there is nothing to go back to.
Decision TrainingLoop::go_back(const Decision& decision) {
  const std::uint64_t from = attempt_;
  const Decision done = guard_->roll_back();
  if (done.ends_run()) return done;
  take_position();
  progress_.note(fmt::format("rolled back by all ranks from attempt {}: {}; on at attempt {}, epoch {}", from,
                             decision.reason, attempt_, guard_->epoch()));
  return done;
}

// Collective. No rank may have told the others yet: a run may be resumed where its data ended.
bool TrainingLoop::all_have_data() {
  int ended = guard_ != nullptr && data_ends_ > 0 && attempt_ >= data_ends_;
  MPI_Allreduce(MPI_IN_PLACE, &ended, 1, MPI_INT, MPI_MAX, communicator_);
  return ended == 0;
}

// On rank 0: which samples the ranks used, should their attempt be skipped.
void TrainingLoop::keep_ledger() {
  SampleSource source;
  source.class_counts.resize(static_cast<std::size_t>(workload_.classes()));
  for (std::int64_t id = 0; !source.class_counts.empty() && id < workload_.training_samples(); ++id) {
    ++source.class_counts[static_cast<std::size_t>(workload_.label(id))];
  }
  source.samples_of = [this](int of_rank, std::uint64_t attempt) {
    std::vector<Sample> samples;
    std::vector<std::int64_t> ids;
    Sampler sampler(options_.seed, workload_.training_samples(), sum_overflow_due() ? 0 : of_rank,
                    collective_.size(), options_.batch, options_.accumulate);
    for (int m = 0; m < options_.accumulate; ++m) {
      sampler.batch(attempt, m, &ids);
      for (const std::int64_t id : ids) samples.push_back({id, workload_.label(id)});
    }
    return samples;
  };
  guard_->keep_ledger(std::move(source));
}

Decision TrainingLoop::attempt() {
  begin();
  choose_samples();
  if (guard_ != nullptr && guard_->wants_layers()) workload_.set_tap(&tap_);
  local_.run(plan_, *this);
  workload_.set_tap(nullptr);
  finish_own_gradients();
  reduce_gradients();
  inspect_reduced();
  const Decision decision = decide();
  if (decision.rolls_back()) return go_back(decision);
  if (decision.apply()) apply();
  finish(decision);
  return decision;
}

void TrainingLoop::begin() {
  if (guard_ != nullptr) {
    guard_->begin();
    if (data_ends_ > 0 && attempt_ + 1 >= data_ends_) guard_->no_next_batch();
  }
  if (omitted()) buffers_before_ = replica_.packed_buffers();
  bucket_.clear();
  loss_ = 0.0;
  plan_.loss_scale = guard_ != nullptr ? guard_->loss_scale() : 1.0;
  if (options_.print_rates) {
    say(fmt::format("rate attempt={} update={} learning_rate={}", attempt_, replica_.updates(),
                    learning_rate()));
  }
}

// The samples of all micro-batches, and what the loss divides by: with the global denominator the mean over
// every rank's targets, whatever their share of them is.
void TrainingLoop::choose_samples() {
  plan_.attempt = attempt_;
  plan_.rank = rank();
  plan_.samples.resize(static_cast<std::size_t>(options_.accumulate));
  plan_.rng_keys.resize(static_cast<std::size_t>(options_.accumulate));
  std::int64_t targets = 0;
  run_stage(Stage::kInput, [&] {
    for (int m = 0; m < options_.accumulate; ++m) {
      local_.set_natural_faults(plan_, m, true);
      Sampler& sampler = sum_overflow_due() ? rank_0_sampler_ : sampler_;
      const auto at = static_cast<std::size_t>(m);
      sampler.batch(attempt_, m, &plan_.samples[at]);
      plan_.rng_keys[at] = rng_key(options_.seed, sum_overflow_due() ? 0 : rank(), attempt_, m);
      targets += workload_.targets(plan_.samples[at]);
      local_.set_natural_faults(plan_, m, false);
    }
  });
  if (guard_ != nullptr) guard_->annotate("targets", targets);
  if (options_.local_denominator) {
    plan_.denominator = static_cast<double>(targets);
  } else if (workload_.variable_targets()) {
    MPI_Allreduce(MPI_IN_PLACE, &targets, 1, MPI_INT64_T, MPI_SUM, communicator_);
    plan_.denominator = static_cast<double>(targets) / collective_.size();
  } else {
    plan_.denominator = static_cast<double>(options_.batch * options_.accumulate);
  }
}

// In the precision in which they will be reduced.
void TrainingLoop::finish_own_gradients() {
  if (guard_ != nullptr) guard_->micro_batch(StepGuard::kWholeWindow);
  if (sum_overflow_due()) grow_to_the_limit(workload_.gradients(), options_.dtype());
  if (guard_ == nullptr || !guard_->healthy()) return bucket_.pack();
  for (const BucketSlice& slice : workload_.layout()) {
    guard_->observe_measured(Stage::kBackward, slice.tensor, bucket_.pack_and_scan(slice), 0,
                             options_.dtype());
  }
}

// A rank that failed takes part with zeros.
void TrainingLoop::reduce_gradients() {
  run_stage(Stage::kReduction, [&] { faults_.at(Stage::kReduction, attempt_, 0); });
  if (guard_ != nullptr && !guard_->healthy()) bucket_.clear();
  if (guard_ != nullptr) guard_->reducing();
  bucket_.reduce();
  for (const BucketSlice& slice : workload_.layout()) {
    if (!faults_.corrupts(Stage::kReduction, attempt_, 0, slice.tensor)) continue;
    bucket_.edit(slice.offset, slice.count, [&](std::span<float> values) {
      faults_.corrupt(Stage::kReduction, attempt_, 0, slice.tensor, values.data(), slice.count);
    });
  }
  MPI_Allreduce(MPI_IN_PLACE, &loss_, 1, MPI_DOUBLE, MPI_SUM, communicator_);
  loss_ /= collective_.size();
}

// Unscales the reduced gradient. Its norm and magnitude come with that: the same bits on every rank.
void TrainingLoop::inspect_reduced() {
  reduced_.clear();
  Probe whole;
  for (const BucketSlice& slice : workload_.layout()) {
    const Probe probe = bucket_.unpack_and_scan(slice, static_cast<float>(1.0 / plan_.loss_scale));
    whole.bad += probe.bad;
    whole.abs_max = std::max(whole.abs_max, probe.abs_max);
    whole.squares += probe.squares;
    reduced_.push_back(probe);
  }
  const double factor = collective_.size();
  gradient_norm_ = whole.finite() ? whole.squares.root() / factor : std::nan("");
  const double clip = options_.clip > 0 ? std::min(1.0, options_.clip / (gradient_norm_ + 1e-6)) : 1.0;
  update_scale_ = {static_cast<float>(clip / factor), static_cast<float>(learning_rate())};
  if (guard_ == nullptr) return;
  guard_->observe_reduced(bucket_.view(), workload_.layout(), reduced_);
  guard_->watch("gradient_norm", gradient_norm_);
  guard_->watch("loss", loss_);
  // At scale 1: a dynamic scale is near the limit by design.
  if (whole.finite()) guard_->watch_headroom("gradient", options_.dtype(), whole.abs_max);
  if (guard_->checks_update_before() && whole.finite()) preview_update();
}

void TrainingLoop::preview_update() {
  for (const SharePiece& piece : guard_->share(workload_.layout())) {
    const auto see = [&](std::string_view part, std::size_t at, std::span<float> values) {
      const std::int64_t offset = piece.begin + static_cast<std::int64_t>(at) - piece.bucket_offset;
      if (part.empty()) faults_.corrupt_piece(Stage::kOptimizer, attempt_, piece.tensor, offset, values);
      guard_->observe(Stage::kOptimizer, state_name(piece.tensor, part), TensorView::of(values), offset);
    };
    replica_.optimizer().preview(static_cast<std::size_t>(piece.bucket_offset),
                                 static_cast<std::size_t>(piece.count), workload_.parameters(),
                                 workload_.gradients(), update_scale_, see);
  }
}

Decision TrainingLoop::decide() {
  if (guard_ != nullptr) {
    if (stop_requested()) guard_->request_stop();
    return guard_->decide();
  }
  return {Action::kApply, StatusCode::kOk, {}};
}

void TrainingLoop::apply() {
  if (omitted()) {
    replica_.unpack_buffers(buffers_before_);
    return;
  }
  const auto body = [&] {
    faults_.at(Stage::kOptimizer, attempt_, 0);
    replica_.update(update_scale_);
    for (const BucketSlice& slice : workload_.layout()) {
      faults_.corrupt_piece(Stage::kOptimizer, attempt_, slice.tensor, 0,
                            part_of(workload_.parameters(), slice));
    }
    if (guard_ != nullptr && !guard_->checks_update_before()) observe_written();
  };
  if (guard_ != nullptr) {
    guard_->update(body);
  } else {
    body();
  }
  replica_.count_update();
  replica_.share_buffers();
}

void TrainingLoop::observe_written() {
  for (const BucketSlice& slice : workload_.layout()) {
    guard_->observe_written(slice.tensor, TensorView::of(part_of(workload_.parameters(), slice)));
    for (const StateArray& array : replica_.optimizer().state()) {
      guard_->observe_written(state_name(slice.tensor, array.name),
                              TensorView::of(part_of(array.values, slice)));
    }
  }
}

void TrainingLoop::finish(const Decision& decision) {
  if (guard_ != nullptr) guard_->finish();
  if (decision.action == Action::kSkip) {
    ++skips_;
    progress_.note(fmt::format("attempt {} skipped by all ranks: {}", attempt_, decision.reason));
  }
  if (decision.last_attempt_with_data && attempt_ + 1 < options_.steps) {
    progress_.note(fmt::format("a rank has no more data: all ranks stop after attempt {}", attempt_));
  }
  progress_.report(attempt_, replica_.updates(), skips_, loss_, gradient_norm_);
  ++attempt_;
}

Ending TrainingLoop::abandon(const Decision& decision) {
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

// Each rank takes its part of the held-out samples.
void TrainingLoop::print_score() {
  const std::int64_t all = workload_.test_samples();
  const std::int64_t wanted = options_.evaluate < 0 ? all : std::min(all, options_.evaluate);
  std::uint64_t elements = 0;
  std::uint64_t non_finite = 0;
  for (const BucketSlice& slice : workload_.layout()) {
    const Probe probe = scan(TensorView::of(part_of(workload_.parameters(), slice)));
    elements += probe.count;
    non_finite += probe.bad.total();
  }
  Score score =
      workload_.evaluate(wanted * rank() / collective_.size(), wanted * (rank() + 1) / collective_.size());
  std::int64_t counts[2] = {score.correct, score.total};
  MPI_Allreduce(MPI_IN_PLACE, counts, 2, MPI_INT64_T, MPI_SUM, communicator_);
  MPI_Allreduce(MPI_IN_PLACE, &score.loss_sum, 1, MPI_DOUBLE, MPI_SUM, communicator_);
  if (counts[1] > 0) {
    const double total = static_cast<double>(counts[1]);
    say(fmt::format("test accuracy {:.4f} ({} of {}), loss {:.4f}", static_cast<double>(counts[0]) / total,
                    counts[0], counts[1], score.loss_sum / total));
  }
  say(fmt::format("parameters total={} non_finite={}", elements, non_finite));
}

void TrainingLoop::print_digests() {
  std::vector<Bytes> lines;
  const Status gathered = collective_.gather(fmt::format("digest rank={} {} attempts={} updates={}", rank(),
                                                         replica_.digests(), attempt_, replica_.updates()),
                                             &lines);
  if (!gathered.ok()) throw std::runtime_error(gathered.to_string());
  for (const Bytes& line : lines) say(line);
}
}  // namespace holdfast::train
