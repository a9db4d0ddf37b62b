// A rank of a job that makes attempts under its watchdog until something goes wrong, for watchdog_jobs.py.
//
//   watchdog_rank RECORD DEADLINE_MS FAULT RANKS
//
// RECORD is appended to by whoever reports a departure; RANKS, like "0,2", are those on which FAULT happens.
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <thread>

#include "holdfast/collectives/mpi_collective.h"
#include "holdfast/collectives/watchdog.h"

namespace {

using holdfast::Phase;
using std::chrono::milliseconds;

constexpr std::uint64_t kAttempts = 6;
constexpr std::uint64_t kFaultyAttempt = 3;

void sleep_for(milliseconds time) { std::this_thread::sleep_for(time); }
[[noreturn]] void hang() {
  for (;;) sleep_for(std::chrono::hours(1));
}

void fail(const std::string& fault, milliseconds deadline, std::unique_ptr<holdfast::Watchdog>& watchdog) {
  if (fault == "stop") raise(SIGSTOP);
  if (fault == "hang") hang();
  if (fault == "kill") raise(SIGKILL);
  if (fault == "exit0") _exit(0);
  if (fault == "exit7") _exit(7);
  if (fault == "leave") {
    watchdog.reset();
    hang();
  }
  if (fault == "pause") {
    watchdog->board().pause();
    sleep_for(3 * deadline);
    watchdog->board().resume();
  }
  if (fault == "slow") sleep_for(deadline / 2);
}

int run(const std::string& record, milliseconds deadline, const std::string& fault,
        const std::string& ranks) {
  std::unique_ptr<holdfast::Collective> collective;
  if (!holdfast::MpiCollective::create(MPI_COMM_WORLD, &collective).ok()) return 1;
  holdfast::Watchdog::Options options;
  options.deadline = deadline;
  options.record = [&](const holdfast::Departure& departure) {
    std::ofstream(record, std::ios::app) << departure.reported_by << (departure.alone ? " alone: " : ": ")
                                         << departure.describe() << std::endl;
  };
  options.before_leaving = [&, rank = collective->rank()] {
    std::ofstream(record + ".left", std::ios::app) << rank << std::endl;
  };
  std::unique_ptr<holdfast::Watchdog> watchdog;
  if (const auto status = holdfast::Watchdog::create(*collective, options, &watchdog); !status.ok()) {
    std::fprintf(stderr, "%s\n", status.to_string().c_str());
    return 1;
  }
  const bool faulty =
      ("," + ranks + ",").find("," + std::to_string(collective->rank()) + ",") != std::string::npos;
  for (std::uint64_t attempt = 0; attempt < kAttempts; ++attempt) {
    watchdog->board().enter(1, attempt, Phase::kBegin);
    if (faulty && attempt == kFaultyAttempt) fail(fault, deadline, watchdog);
    watchdog->board().enter(1, attempt, Phase::kObserve);
    if (faulty && attempt == kFaultyAttempt && fault == "slow_together") sleep_for(3 * deadline);
    if (faulty && attempt == kFaultyAttempt && fault == "hang_together") hang();
    float gradient = 1;
    MPI_Allreduce(MPI_IN_PLACE, &gradient, 1, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);  // the trainer's own
    watchdog->board().enter(1, attempt, Phase::kDecide);
    holdfast::Record verdict;
    if (!collective->reduce(verdict).ok()) return 1;
    watchdog->board().enter(1, attempt, Phase::kOutside);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &provided);
  if (argc != 5) return 64;
  // As in a trainer that stops in an orderly way. When two ranks die, mpirun sends this at the second death.
  signal(SIGTERM, SIG_IGN);
  const int code = run(argv[1], milliseconds(std::atoi(argv[2])), argv[3], argv[4]);
  MPI_Finalize();
  return code;
}
