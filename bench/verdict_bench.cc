// What a verdict costs beside the bare all-reduce that is in it, and what one costs that is not clean.
//
//   mpirun -np N verdict_bench [--rounds R] [--block-us M] [--attempts A]
//
// R rounds, of one block of calls for each contender, in turns and in another order each round; a ratio is
// the median over the rounds, `control` is the bare all-reduce over itself in the same rounds, `spread` the
// quartiles of that. A attempts that are not clean take turns with clean ones; the time is that of the
// slowest rank. Results are checked, before and while they are timed: exit status 1 when one is wrong.
#include <fmt/format.h>
#include <mpi.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "bad_attempts.h"
#include "holdfast/collectives/mpi_collective.h"
#include "holdfast/collectives/verdict.h"

namespace {

// The communicator that MpiCollective duplicated last.
MPI_Comm g_duplicate = MPI_COMM_NULL;

}  // namespace

// MPI's profiling interface: the bare all-reduce runs over the same communicator as the guard's.
extern "C" int MPI_Comm_dup(MPI_Comm comm, MPI_Comm* duplicate) {
  const int code = PMPI_Comm_dup(comm, duplicate);
  g_duplicate = *duplicate;
  return code;
}

namespace {

using namespace holdfast;
using Clock = std::chrono::steady_clock;

struct Options {
  int rounds = 1001;
  double block_us = 100;
  int attempts = 200;
};

void require(bool good, const std::string& what) {
  if (good) return;
  fmt::print(stderr, "verdict_bench: {}\n", what);
  MPI_Abort(MPI_COMM_WORLD, 1);
}
void require(const Status& status) { require(status.ok(), status.to_string()); }

double nanoseconds(Clock::duration time) { return std::chrono::duration<double, std::nano>(time).count(); }

double quantile(std::vector<double> values, double q) {
  std::ranges::sort(values);
  return values[static_cast<std::size_t>(q * static_cast<double>(values.size() - 1) + 0.5)];
}
double median(std::vector<double> values) { return quantile(std::move(values), 0.5); }

class Bench {
 public:
  explicit Bench(const Options& options) : options_(options) {
    require(MpiCollective::create(MPI_COMM_WORLD, &collective_));
    communicator_ = g_duplicate;
    rank_ = collective_->rank();
    ranks_ = collective_->size();
    coefficient_ = agreement_coefficient(rank_, ranks_);
    require(bench::make_guard(*collective_, &guard_));
    hosts_ = count_hosts();
  }

  void run() {
    check_sums();
    check_bad_record();
    clean();
    std::vector<int> numbers = {1, (ranks_ + 3) / 4, ranks_};
    numbers.erase(std::unique(numbers.begin(), numbers.end()), numbers.end());
    for (const int bad : numbers) bad_path(bad);
    require(guard_->close().apply(), "the end of the run was refused");
  }

 private:
  int count_hosts() {
    MPI_Comm node = MPI_COMM_NULL;
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, rank_, MPI_INFO_NULL, &node);
    int leader = 0;
    MPI_Comm_rank(node, &leader);
    leader = leader == 0 ? 1 : 0;
    MPI_Comm_free(&node);
    int hosts = 0;
    MPI_Allreduce(&leader, &hosts, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    return hosts;
  }

  void bare_reduce(std::array<std::uint64_t, Record::kLanes>& lanes) {
    MPI_Allreduce(MPI_IN_PLACE, lanes.data(), static_cast<int>(lanes.size()), MPI_UINT64_T, MPI_SUM,
                  communicator_);
  }

  void check_sums() {
    Record record;
    std::array<std::uint64_t, Record::kLanes> bare{};
    for (std::size_t i = 0; i < Record::kLanes; ++i) {
      bare[i] = record.lanes()[i] = static_cast<std::uint64_t>(rank_ + 1) * (i + 1) << 40;
    }
    bare_reduce(bare);
    require(collective_->reduce(record));
    const auto triangle = static_cast<std::uint64_t>(ranks_) * static_cast<std::uint64_t>(ranks_ + 1) / 2;
    for (std::size_t i = 0; i < Record::kLanes; ++i) {
      require(bare[i] == triangle * (i + 1) << 40 && record.lanes()[i] == bare[i], "a sum is wrong");
    }
  }

  // A record that is filled as in an attempt.
  Record filled() {
    Record record;
    record.set_participant(coefficient_ * agreement_hash({1, attempt_, 0x5eed}));
    return record;
  }

  void check_bad_record() {
    Record record = filled();
    if (rank_ == ranks_ - 1) {
      record.add_bad(Stage::kLoss, {.nan = 3});
      record.mark_bad(rank_);
    }
    require(collective_->reduce(record));
    const Verdict verdict = judge(record, ranks_);
    require(verdict.kind == Verdict::Kind::kNonFinite && verdict.earliest_stage == Stage::kLoss &&
                verdict.only_bad_rank == ranks_ - 1 && verdict.sum.bad(Stage::kLoss) == BadCounts{.nan = 3},
            "a bad record was not seen");
  }

  // ---- contenders
  void bare() { bare_reduce(lanes_); }

  void verdict() {
    ++attempt_;
    Record record = filled();
    const Status status = collective_->reduce(record);
    all_clean_ = status.ok() && judge(record, ranks_).clean() && all_clean_;
  }

  void attempt() {
    guard_->begin();
    all_clean_ = guard_->decide().apply() && all_clean_;
    guard_->finish();
  }

  // ---- timing
  static double time(const std::function<void()>& call, int calls) {
    const auto begin = Clock::now();
    for (int i = 0; i < calls; ++i) call();
    return nanoseconds(Clock::now() - begin) / calls;
  }

  // All ranks must make the same number of calls.
  int calls_in_a_block() {
    MPI_Barrier(communicator_);
    const double each = time([this] { bare(); }, 200);
    int calls = std::clamp(static_cast<int>(options_.block_us * 1e3 / each), 5, 100000);
    MPI_Bcast(&calls, 1, MPI_INT, 0, communicator_);
    return calls;
  }

  void clean() {
    const std::array<std::function<void()>, 4> contenders = {[this] { bare(); }, [this] { verdict(); },
                                                             [this] { bare(); }, [this] { attempt(); }};
    std::array<std::vector<double>, 4> times;
    const int calls = calls_in_a_block();
    const std::uint64_t updates = guard_->updates();
    for (int round = 0; round < options_.rounds; ++round) {
      for (std::size_t turn = 0; turn < contenders.size(); ++turn) {
        const std::size_t c = (turn + static_cast<std::size_t>(round)) % contenders.size();
        MPI_Barrier(communicator_);
        times[c].push_back(time(contenders[c], calls));
      }
    }
    require(all_clean_, "a clean attempt was not clean");
    const auto attempts = static_cast<std::uint64_t>(options_.rounds) * static_cast<std::uint64_t>(calls);
    require(guard_->updates() - updates == attempts, "updates were lost");
    if (rank_ != 0) return;
    tell("verdict", times, 1);
    tell("attempt", times, 3);
  }

  void tell(std::string_view name, const std::array<std::vector<double>, 4>& times, std::size_t contender) {
    std::vector<double> ratios;
    std::vector<double> controls;
    std::vector<double> bare;
    std::vector<double> over;
    for (std::size_t r = 0; r < times[0].size(); ++r) {
      bare.push_back((times[0][r] + times[2][r]) / 2);
      ratios.push_back(times[contender][r] / bare.back());
      controls.push_back(times[2][r] / times[0][r]);
      over.push_back(times[contender][r] - bare.back());
    }
    fmt::print(
        "ratio ranks={} hosts={} {}_over_allreduce={:.3f} control={:.3f} spread={:.3f}..{:.3f} "
        "allreduce_ns={:.0f} {}_ns={:.0f} over_ns={:.0f}\n",
        ranks_, hosts_, name, median(ratios), median(controls), quantile(controls, 0.25),
        quantile(controls, 0.75), median(bare), name, median(times[contender]), median(over));
  }

  // From decide() on the first rank that calls it to the decision on the last one that gets it, as far as a
  // barrier can tell.
  double time_decision(int bad) {
    bench::begin_attempt(*guard_, bench::is_bad(rank_, ranks_, bad));
    MPI_Barrier(communicator_);
    const auto begin = Clock::now();
    const Decision decision = guard_->decide();
    double time = nanoseconds(Clock::now() - begin);
    require(decision.action == (bad > 0 ? Action::kSkip : Action::kApply),
            fmt::format("{} of {} ranks are bad, and the decision is {} {}", bad, ranks_,
                        action_name(decision.action), decision.reason));
    guard_->finish();
    MPI_Allreduce(MPI_IN_PLACE, &time, 1, MPI_DOUBLE, MPI_MAX, communicator_);
    return time;
  }

  void bad_path(int bad) {
    std::vector<double> clean;
    std::vector<double> skipped;
    for (int i = 0; i < options_.attempts; ++i) {
      clean.push_back(time_decision(0));
      skipped.push_back(time_decision(bad));
    }
    if (rank_ != 0) return;
    fmt::print("badpath ranks={} hosts={} bad={} us={:.1f} clean_us={:.1f}\n", ranks_, hosts_, bad,
               median(skipped) / 1000, median(clean) / 1000);
  }

  const Options options_;
  std::unique_ptr<Collective> collective_;
  std::unique_ptr<StepGuard> guard_;
  MPI_Comm communicator_ = MPI_COMM_NULL;
  int rank_ = 0;
  int ranks_ = 0;
  int hosts_ = 0;
  std::uint64_t coefficient_ = 0;
  std::uint64_t attempt_ = 0;
  std::array<std::uint64_t, Record::kLanes> lanes_{};
  bool all_clean_ = true;
};

bool parse(int argc, char** argv, Options* options) {
  for (int i = 1; i < argc; i += 2) {
    if (i + 1 == argc) return false;
    const std::string name = argv[i];
    const double value = std::atof(argv[i + 1]);
    if (value < 1) return false;
    if (name == "--rounds") {
      options->rounds = static_cast<int>(value);
    } else if (name == "--block-us") {
      options->block_us = value;
    } else if (name == "--attempts") {
      options->attempts = static_cast<int>(value);
    } else {
      return false;
    }
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  if (!parse(argc, argv, &options)) {
    fmt::print(stderr, "usage: verdict_bench [--rounds R] [--block-us M] [--attempts A], each at least 1\n");
    return 64;
  }
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &provided);
  Bench(options).run();
  MPI_Finalize();
  return 0;
}
