// A run of thousands of attempts with faults of every stage, kills and resumes ends bit for bit where one
// without kills, rollbacks and stops ends. Ranks are threads of a process of its own, which is really killed.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>

#include "coord/temp_dir.h"
#include "holdfast/collectives/thread_collective.h"
#include "holdfast/coord/state.h"
#include "holdfast/coord/state.pb.h"
#include "holdfast/step_guard.h"

namespace holdfast {
namespace {

constexpr int kRanks = 4;
constexpr std::size_t kWeights = 61;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

constexpr const char* kPolicy =
    "max_total_skips: 100000 max_consecutive_skips: 1000 max_rollbacks: 100000 max_identical_failures: 50 "
    "on_error: SKIP on_divergence: GO_BACK proof_interval_attempts: 10 prove_optimizer_state: true "
    "sweep_interval_attempts: 20 state_interval_attempts: 40 "
    "loss_scale { growth_interval: 20 window_attempts: 100 max_calibration_skips: 50 }";

std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}
template <typename... Numbers>
std::uint64_t draw(Numbers... numbers) {
  std::uint64_t h = 0;
  ((h = mix(h ^ static_cast<std::uint64_t>(numbers))), ...);
  return h;
}
float small(std::uint64_t h) { return static_cast<float>(h % 2001) / 1000.0f - 1.0f; }

// What goes wrong in an attempt, whenever it is made: those are skipped, in every run alike.
enum class Lasting { kNone, kInput, kForward, kLoss, kBackward, kOverflow, kReduction, kException, kCount };
Lasting lasting_fault(std::uint64_t seed, std::uint64_t attempt) {
  const std::uint64_t h = draw(seed, 1, attempt);
  return h % 60 != 0 ? Lasting::kNone
                     : static_cast<Lasting>(1 + (h >> 32) % (static_cast<int>(Lasting::kCount) - 1));
}

// What goes wrong only in this epoch: undone by going back, or by a restart.
enum class Passing { kNone, kNanByAll, kNanByOne, kThrow, kFlip, kNanInMomentum, kStop, kDie, kCount };
Passing passing_fault(std::uint64_t seed, std::uint64_t epoch, std::uint64_t attempt) {
  const std::uint64_t h = draw(seed, 2, epoch, attempt);
  return h % 150 != 0 ? Passing::kNone
                      : static_cast<Passing>(1 + (h >> 32) % (static_cast<int>(Passing::kCount) - 1));
}

struct Job {
  std::string run_dir;
  std::uint64_t seed = 1;
  std::uint64_t attempts = 0;
  bool disturbed = false;  // by passing faults
};

class SoakRank {
 public:
  SoakRank(const Job& job, Collective& collective) : job_(job), collective_(collective) {
    for (std::size_t i = 0; i < kWeights; ++i) weights_[i] = average_[i] = small(draw(job.seed, 3, i));
    shard_.resize(share(rank() + 1) - share(rank()));
  }

  int run() {
    GuardOptions options;
    options.policy = kPolicy;
    options.run_dir = job_.run_dir;
    options.resume = true;
    options.loss_scaling = true;
    options.watchdog = false;
    options.checkpoints = {.interval_attempts = 25, .keep = 3, .keep_every = 40, .quota_bytes = 0};
    std::unique_ptr<StepGuard> guard;
    if (Status s = StepGuard::create(collective_, options, &guard); !s.ok()) return s.exit_code();
    guard_ = guard.get();
    guard_->protect("running", running_, DType::kFloat32, 2);
    keep_ledger();
    if (Status s = guard_->register_state(state()); !s.ok()) return s.exit_code();
    for (bool closed = false; !closed;) {
      while (guard_->attempt() < job_.attempts) {
        const Decision decision = attempt();
        if (decision.ends_run()) return decision.exit_code();
      }
      Decision decision = guard_->close();
      closed = decision.apply();
      if (decision.rolls_back()) decision = guard_->roll_back();
      if (decision.ends_run()) return decision.exit_code();
    }
    return tell() ? 0 : 1;
  }

 private:
  static std::size_t share(int rank) { return kWeights * static_cast<std::size_t>(rank) / kRanks; }
  int rank() const { return collective_.rank(); }
  bool is_one(std::uint64_t salt) const {
    return static_cast<int>(draw(job_.seed, salt, guard_->attempt()) % kRanks) == rank();
  }

  void keep_ledger() {
    SampleSource source;
    source.class_counts = {50, 50};
    source.samples_of = [this](int of_rank, std::uint64_t attempt) {
      const auto id = static_cast<std::int64_t>(draw(job_.seed, 4, of_rank, attempt) % 100);
      return std::vector<Sample>{{id, static_cast<int>(id % 2)}};
    };
    guard_->keep_ledger(source);
  }

  TrainingState state() {
    TrainingState state;
    const auto add = [&](const char* name, float* data, std::size_t count) -> StateTensor {
      StateTensor tensor;
      tensor.name = name;
      tensor.data = data;
      tensor.shape = {static_cast<std::int64_t>(count)};
      return tensor;
    };
    state.add(add("weights", weights_, kWeights));
    for (auto [name, data] : {std::pair{"momentum", momentum_}, {"average", average_}}) {
      StateTensor tensor = add(name, data, kWeights);
      tensor.is_optimizer_state = true;
      state.add(tensor);
    }
    StateTensor running = add("running", running_, 2);
    running.forward_mutates = true;
    state.add(running);
    StateTensor shard = add("shard", shard_.data(), shard_.size());
    shard.held = Held::kSharded;
    shard.shard_offset = static_cast<std::int64_t>(share(rank()));
    shard.shard_total = kWeights;
    state.add(shard);
    state.add(StateBytes{"draws", [this] { return std::to_string(draws_); },
                         [this](const Bytes& bytes) {
                           draws_ = std::stoull(bytes);
                           return Status();
                         },
                         Held::kPerRank});
    return state;
  }

  Decision attempt() {
    const std::uint64_t at = guard_->attempt();
    const Lasting lasting = lasting_fault(job_.seed, at);
    const Passing passing = job_.disturbed ? passing_fault(job_.seed, guard_->epoch(), at) : Passing::kNone;
    if (passing == Passing::kDie && rank() == 0) raise(SIGKILL);
    guard_->begin();
    float sample = small(draw(job_.seed, 5, rank(), at));
    guard_->run(Stage::kInput, [&] {
      if (lasting == Lasting::kException && is_one(6)) throw std::runtime_error("no such record");
      if (lasting == Lasting::kInput && is_one(6)) sample = kNan;
    });
    observe(Stage::kInput, "sample", &sample, 1);
    running_[0] = 0.9f * running_[0] + 0.1f * sample;
    running_[1] += 1.0f;
    if (lasting == Lasting::kForward && is_one(6)) running_[0] = std::numeric_limits<float>::infinity();
    guard_->observe_loss(lasting == Lasting::kLoss && is_one(6) ? static_cast<double>(kNan) : 1.0);
    float gradient[kWeights];
    for (std::size_t i = 0; i < kWeights; ++i) gradient[i] = own_gradient(at, rank(), i);
    if (lasting == Lasting::kBackward && is_one(6)) gradient[draw(at) % kWeights] = kNan;
    if (lasting == Lasting::kOverflow && is_one(6)) gradient[3] = std::numeric_limits<float>::infinity();
    observe(Stage::kBackward, "gradient", gradient, kWeights);
    float sum[kWeights];
    for (std::size_t i = 0; i < kWeights; ++i) {
      sum[i] = 0;
      for (int r = 0; r < kRanks; ++r) sum[i] += own_gradient(at, r, i);
    }
    if (lasting == Lasting::kReduction) sum[7] = -std::numeric_limits<float>::infinity();
    const BucketSlice whole{"gradient", 0, kWeights};
    guard_->observe_share(TensorView::of(std::span<const float>(sum)), std::span(&whole, 1));
    guard_->watch("gradient_norm", std::abs(static_cast<double>(sum[0])) + 1);
    if (passing == Passing::kStop) guard_->request_stop();
    const Decision decision = guard_->decide();
    if (decision.rolls_back()) return guard_->roll_back();
    if (decision.ends_run()) return decision;
    if (decision.apply()) {
      guard_->update([&] { update(sum, passing); });
      ++draws_;
      Bytes rank_0s(reinterpret_cast<const char*>(running_), sizeof running_);
      if (!collective_.broadcast(&rank_0s).ok()) std::abort();
      std::memcpy(running_, rank_0s.data(), sizeof running_);
    }
    guard_->finish();
    // Another door than the update: found by the sweep, and by the proof.
    if (passing == Passing::kNanInMomentum && is_one(7)) momentum_[11] = kNan;
    if (passing == Passing::kFlip && is_one(7)) weights_[13] += 0.25f;
    return decision;
  }

  float own_gradient(std::uint64_t at, int of_rank, std::size_t i) const {
    return 0.1f * weights_[i] + small(draw(job_.seed, 8, at, of_rank, i));
  }

  void update(const float* sum, Passing passing) {
    const float rate = 0.01f / (1.0f + 0.001f * static_cast<float>(guard_->updates()));
    for (std::size_t i = 0; i < kWeights; ++i) {
      momentum_[i] = 0.9f * momentum_[i] + sum[i] / kRanks;
      weights_[i] -= rate * momentum_[i];
      average_[i] = 0.99f * average_[i] + 0.01f * weights_[i];
    }
    for (std::size_t i = 0; i < shard_.size(); ++i) shard_[i] += weights_[share(rank()) + i];
    const bool writes_nan = passing == Passing::kNanByAll || (passing == Passing::kNanByOne && is_one(7));
    if (writes_nan) weights_[5] = kNan;
    guard_->observe_written("weights", TensorView::of(std::span<const float>(weights_)));
    if (passing == Passing::kThrow && is_one(7)) throw std::runtime_error("a kernel failed");
  }

  void observe(Stage stage, const char* name, const float* data, std::size_t count) {
    guard_->observe(stage, name, TensorView::of(std::span<const float>(data, count)));
  }

  // RUN_DIR/end.R: everything that this rank holds, bit for bit.
  bool tell() const {
    std::ofstream out(job_.run_dir + "/end." + std::to_string(rank()), std::ios::binary);
    const auto put = [&](const void* data, std::size_t bytes) {
      out.write(static_cast<const char*>(data), static_cast<std::streamsize>(bytes));
    };
    put(weights_, sizeof weights_);
    put(momentum_, sizeof momentum_);
    put(average_, sizeof average_);
    put(running_, sizeof running_);
    put(shard_.data(), shard_.size() * sizeof(float));
    out << draws_ << ' ' << guard_->attempt() << ' ' << guard_->updates() << ' ' << guard_->skips() << ' '
        << guard_->loss_scale() << ' ' << guard_->loss_scale_state().clean_updates;
    return static_cast<bool>(out.flush());
  }

  const Job& job_;
  Collective& collective_;
  StepGuard* guard_ = nullptr;
  float weights_[kWeights] = {};
  float momentum_[kWeights] = {};
  float average_[kWeights] = {};
  float running_[2] = {};
  std::vector<float> shard_;
  std::uint64_t draws_ = 0;
};

// In a process of its own; its exit code, or 128 and the signal that ended it. Killed after `patience`, if
// that is not negative.
int run_process(const Job& job, std::chrono::milliseconds patience) {
  const pid_t pid = fork();
  if (pid == 0) {
    std::array<int, kRanks> codes{};
    ThreadGroup(kRanks).run([&](Collective& collective) {
      codes[static_cast<std::size_t>(collective.rank())] = SoakRank(job, collective).run();
    });
    const bool same = std::ranges::count(codes, codes[0]) == kRanks;
    std::fflush(nullptr);
    _exit(same ? codes[0] : 99);
  }
  if (patience.count() >= 0) {
    usleep(static_cast<useconds_t>(patience.count()) * 1000);
    kill(pid, SIGKILL);
  }
  int status = 0;
  waitpid(pid, &status, 0);
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

// What is dropped when all is said: attempt to line.
std::map<std::uint64_t, std::string> dropped(const std::string& run_dir) {
  std::map<std::uint64_t, std::string> lines;
  std::ifstream in(run_dir + "/dropped.jsonl");
  for (std::string text; std::getline(in, text);) {
    auto line = nlohmann::json::parse(text);
    const std::uint64_t attempt = line["attempt"];
    if (line["event"] == "went_back") {
      lines.erase(lines.lower_bound(attempt), lines.end());
      continue;
    }
    line.erase("time");
    line.erase("epoch");
    EXPECT_TRUE(lines.emplace(attempt, line.dump()).second) << "dropped twice: " << text;
  }
  return lines;
}

// Budgets, windows, calibration and scale; not what the run has been through.
std::string budgets(const std::string& run_dir) {
  RunState state;
  EXPECT_TRUE(read_state(run_dir, &state).ok());
  for (const char* field : {"epoch", "holder", "incidents", "endings", "rollbacks", "repeated_failure",
                            "first_attempt", "generation", "restore_before", "fell_back", "run_id", "claimed_epoch", "restored_attempt"}) {
    const auto* descriptor = state.GetDescriptor()->FindFieldByName(field);
    if (descriptor == nullptr) ADD_FAILURE() << field;
    state.GetReflection()->ClearField(&state, descriptor);
  }
  return state.DebugString();
}

// HOLDFAST_SOAK_ATTEMPTS and HOLDFAST_SOAK_SEED make it longer, and another.
std::uint64_t asked(const char* variable, std::uint64_t otherwise) {
  const char* value = std::getenv(variable);
  return value != nullptr ? std::strtoull(value, nullptr, 10) : otherwise;
}

TEST(Soak, KillsRollbacksAndStopsLeaveNoTraceInWhatIsTrained) {
  const TempDir temp;
  const std::uint64_t seed = asked("HOLDFAST_SOAK_SEED", 1);
  const Job calm{temp / "calm", seed, asked("HOLDFAST_SOAK_ATTEMPTS", 1500), false};
  ASSERT_EQ(run_process(calm, std::chrono::milliseconds(-1)), 0);
  const Job rough{temp / "rough", seed, calm.attempts, true};
  std::mt19937_64 random(seed);
  std::map<int, int> ends;
  for (int code = -1; code != 0;) {
    const bool killed = random() % 3 == 0;
    code = run_process(rough, std::chrono::milliseconds(killed ? 20 + static_cast<int>(random() % 400) : -1));
    ++ends[code];
    ASSERT_TRUE(code == 0 || code == 86 || code == 137) << code;
    ASSERT_LT(
        std::accumulate(ends.begin(), ends.end(), 0, [](int n, const auto& end) { return n + end.second; }),
        2000);
  }
  EXPECT_GT(ends[137] + ends[86], 0);
  if (calm.attempts >= 10'000) {  // enough of them for each kind
    EXPECT_GT(ends[137], 0);
    EXPECT_GT(ends[86], 0);
  }
  RunState state;
  ASSERT_TRUE(read_state(rough.run_dir, &state).ok());
  EXPECT_GT(state.rollbacks(), 0u);
  for (int r = 0; r < kRanks; ++r) {
    const std::string name = "/end." + std::to_string(r);
    EXPECT_EQ(read_file(calm.run_dir + name), read_file(rough.run_dir + name)) << "rank " << r;
  }
  EXPECT_EQ(budgets(calm.run_dir), budgets(rough.run_dir));
  const auto expected = dropped(calm.run_dir);
  EXPECT_GT(expected.size(), 10u);
  EXPECT_EQ(dropped(rough.run_dir), expected);
  std::printf("%d killed, %d stopped, %d rollbacks, %zu skips\n", ends[137], ends[86],
              static_cast<int>(state.rollbacks()), expected.size());
}

}  // namespace
}  // namespace holdfast
