// Data-parallel training over MPI, guarded: mpirun -np N guarded_train.
#include <fmt/format.h>
#include <mpi.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <string>

#include "holdfast/collectives/mpi_collective.h"
#include "train/options.h"
#include "train/replay.h"
#include "train/trainer.h"

namespace {

using holdfast::Collective;
using holdfast::MpiCollective;
using holdfast::Status;
using holdfast::train::Ending;
using holdfast::train::Options;

Ending guarded_train(const Options& options, const Status& parsed) {
  std::unique_ptr<Collective> collective;
  if (Status s = MpiCollective::create(MPI_COMM_WORLD, &collective); !s.ok()) return {s, false};
  return holdfast::train::train(options, parsed, MPI_COMM_WORLD, *collective);
}

// Other ranks may be inside a collective that this one will never join, so it does not wait for them: mpirun
// sees the exit code and ends them.
[[noreturn]] void leave_alone(int exit_code) {
  std::fflush(nullptr);
  std::_Exit(exit_code);
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  std::string help;
  const Status parsed = holdfast::train::parse_options(argc, argv, &options, &help);
  if (!help.empty()) {
    // Under mpirun, once will do.
    const char* rank = std::getenv("OMPI_COMM_WORLD_RANK");
    if (rank == nullptr || std::string(rank) == "0") std::fputs(help.c_str(), stdout);
    return 0;
  }
  // One process by itself. Open MPI would start a daemon for it, in a folder that replays at the same time would share.
  if (!options.replay.empty()) setenv("OMPI_MCA_ess_singleton_isolated", "1", 0);
  int provided = MPI_THREAD_SINGLE;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &provided);
  try {
    if (parsed.ok() && !options.replay.empty()) {
      const int code = holdfast::train::replay(options);
      MPI_Finalize();
      return code;
    }
    const Ending ending = guarded_train(options, parsed);
    if (!ending.agreed) leave_alone(ending.status.exit_code());
    MPI_Finalize();
    return ending.status.exit_code();
  } catch (const std::exception& error) {
    fmt::print(stderr, "guarded_train: {}\n", error.what());
    leave_alone(static_cast<int>(holdfast::StatusCode::kInternal));
  }
}
