// The smallest guarded trainer: plain MPI and arrays. Fits y = a . x by gradient descent on every rank's own
// samples; at attempt 50 the last rank's data holds a NaN, every rank skips, and training goes on.
//
//   mpirun -np 4 mpi_minimal [run folder]
#include <mpi.h>

#include <cstdio>
#include <cstdlib>
#include <memory>

#include "examples/least_squares.h"
#include "holdfast/collectives/mpi_collective.h"
#include "holdfast/step_guard.h"

namespace {

using holdfast::Decision;
using holdfast::Stage;
using holdfast::StepGuard;
using holdfast::TensorView;

int train(const char* run_dir) {
  int rank = 0;
  int size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);

  std::unique_ptr<holdfast::Collective> collective;
  holdfast::Status status = holdfast::MpiCollective::create(MPI_COMM_WORLD, &collective);
  std::unique_ptr<StepGuard> guard;
  holdfast::GuardOptions options;
  options.run_dir = run_dir;
  if (status.ok()) status = StepGuard::create(*collective, options, &guard);
  if (!status.ok()) {
    std::fprintf(stderr, "%s\n", status.to_string().c_str());
    return status.exit_code();
  }

  least_squares::Vector weights{};
  least_squares::Vector gradient{};
  const holdfast::BucketSlice layout{"weights", 0, least_squares::kFeatures};
  for (int attempt = 0; attempt < least_squares::kAttempts; ++attempt) {
    guard->begin();
    guard->run(Stage::kBackward, [&] {
      guard->observe_loss(least_squares::gradient_of(weights, rank, size, attempt, &gradient));
    });
    if (!guard->healthy()) gradient.fill(0);
    guard->observe(Stage::kBackward, "weights", TensorView::of(gradient));
    guard->reducing();
    MPI_Allreduce(MPI_IN_PLACE, gradient.data(), least_squares::kFeatures, MPI_FLOAT, MPI_SUM,
                  MPI_COMM_WORLD);
    guard->observe_share(TensorView::of(gradient), {&layout, 1});

    const Decision decision = guard->decide();
    if (decision.apply()) {
      guard->update([&] { least_squares::descend(gradient, size, &weights); });
    } else if (rank == 0) {
      std::printf("attempt %d: %s\n", attempt, decision.reason.c_str());
    }
    guard->finish();
    if (!decision.agreed) std::_Exit(decision.exit_code());  // others may be gone: no MPI_Finalize
    if (decision.ends_run()) return decision.exit_code();
  }
  const Decision end = guard->close();
  if (!end.agreed) std::_Exit(end.exit_code());
  if (rank == 0) {
    std::printf("updates %llu of %d attempts, largest error of a weight %.6f\n",
                static_cast<unsigned long long>(guard->updates()), least_squares::kAttempts,
                static_cast<double>(least_squares::largest_error(weights)));
  }
  return end.exit_code();
}

}  // namespace

int main(int argc, char** argv) {
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &provided);
  const int exit_code = train(argc > 1 ? argv[1] : "");
  MPI_Finalize();
  return exit_code;
}
