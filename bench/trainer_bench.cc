// What the guard costs a whole trainer: guarded_train's training loop three times in one process on each
// rank, one guarded and two not, which take turns of a few attempts. What disturbs the machine for longer
// than a turn disturbs all three. All have to end with the same state, bit for bit.
//
//   mpirun -np 2 trainer_bench ROUNDS TURN [guarded_train options...]
//
//   ratio guarded_over_unguarded=1.0041 interval=0.9986..1.0071 control=1.0021 interval=0.9967..1.0056
//
// Medians over the rounds of what is a ratio within each, with their 95 % intervals; `control` is unguarded
// over unguarded. What a checkpoint, a proof or the sweep costs the turn in which it is made shows in the
// rounds that have one, and so in the median only when most have: see --checkpoint-interval and TURN.
#include <fmt/format.h>
#include <mpi.h>

#include <cmath>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "holdfast/collectives/mpi_collective.h"
#include "paired.h"
#include "require.h"
#include "train/options.h"
#include "train/prepare.h"
#include "train/trainer.h"
#include "train/training_loop.h"

namespace {

using namespace holdfast;
using namespace holdfast::bench;
using train::Options;

class Contender {
 public:
  Contender(Options options, bool guarded) : options_(std::move(options)) {
    options_.guard = guarded;
    MPI_Comm_dup(MPI_COMM_WORLD, &communicator_);
    require(MpiCollective::create(communicator_, &collective_));
    require(train::prepare(options_, collective_->size(), &prepared_));
    require(train::make_guard(options_, prepared_, *collective_, &guard_));
    loop_ =
        std::make_unique<train::TrainingLoop>(options_, communicator_, *collective_, prepared_, guard_.get());
    require(loop_->register_state());
  }
  ~Contender() {
    guard_.reset();  // first: it reads what the loop holds
    loop_.reset();
    collective_.reset();
    MPI_Comm_free(&communicator_);
  }
  Contender(const Contender&) = delete;
  Contender& operator=(const Contender&) = delete;

  // Seconds, of the slowest rank.
  double turn(int attempts) {
    MPI_Barrier(communicator_);
    return seconds([&] {
      for (int i = 0; i < attempts; ++i) require(loop_->attempt().apply(), "an attempt was not applied");
      MPI_Barrier(communicator_);
    });
  }

  void close() { require(!guard_ || guard_->close().apply(), "the guard did not close in order"); }
  std::string digests() { return loop_->digests(); }

 private:
  Options options_;
  MPI_Comm communicator_ = MPI_COMM_NULL;
  std::unique_ptr<Collective> collective_;
  train::Preparation prepared_;
  std::unique_ptr<StepGuard> guard_;
  std::unique_ptr<train::TrainingLoop> loop_;
};

std::string text(std::vector<double> ratios) {
  const auto [low, high] = median_interval(ratios);
  return fmt::format("{:.4f} interval={:.4f}..{:.4f}", median(std::move(ratios)), low, high);
}

void run(const Options& options, int rounds, int attempts) {
  Contender first(options, false);
  Contender guarded(options, true);
  Contender last(options, false);
  for (Contender* each : {&first, &guarded, &last}) each->turn(attempts);  // caches fill
  std::vector<double> ratios, controls, bases;
  // Always in this order: nobody has two turns in a row, and finds its own memory in the caches.
  for (int round = 0; round < rounds; ++round) {
    const double before = first.turn(attempts);
    const double middle = guarded.turn(attempts);
    const double after = last.turn(attempts);
    ratios.push_back(2 * middle / (before + after));
    controls.push_back(after / before);
    bases.push_back(before);
  }
  require(first.digests() == guarded.digests() && first.digests() == last.digests(), "the states differ");
  guarded.close();
  int rank = 0;
  int size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (rank != 0) return;
  fmt::print("speed ranks={} unguarded_attempt={:.0f} us\n", size, median(bases) / attempts * 1e6);
  fmt::print("ratio guarded_over_unguarded={} control={}\n", text(std::move(ratios)),
             text(std::move(controls)));
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 0;
  const int attempts = argc > 2 ? std::atoi(argv[2]) : 0;
  Options options;
  std::string help;
  // The numbers are taken out, and the program's name stays where it is expected.
  std::vector<char*> words = {argv[0]};
  for (int i = 3; i < argc; ++i) words.push_back(argv[i]);
  const Status parsed = train::parse_options(static_cast<int>(words.size()), words.data(), &options, &help);
  if (rounds < 10 || attempts < 1 || !parsed.ok()) {
    fmt::print(
        stderr,
        "usage: mpirun -np N trainer_bench ROUNDS TURN [guarded_train options...], at least 10 rounds{}\n",
        parsed.ok() ? "" : ": " + parsed.message());
    return 64;
  }
  options.progress = train::Progress::Mode::kOff;
  int provided = 0;
  MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided);
  run(options, rounds, attempts);
  MPI_Finalize();
  return 0;
}
