// The smallest guarded trainer: plain MPI and arrays. Fits y = a . x by gradient descent on every rank's own
// samples; at attempt 50 the last rank's data holds a NaN, every rank skips, and training goes on.
//
//   mpirun -np 4 mpi_minimal [run folder]
#include <mpi.h>

#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <random>

#include "holdfast/collectives/mpi_collective.h"
#include "holdfast/step_guard.h"

namespace {

using holdfast::Decision;
using holdfast::Stage;
using holdfast::StepGuard;
using holdfast::TensorView;

constexpr int kFeatures = 8;
constexpr int kSamples = 64;
constexpr int kAttempts = 200;
constexpr int kBadAttempt = 50;
using Vector = std::array<float, kFeatures>;

// The gradient of the mean squared error over one batch of this rank; returns the error.
float gradient_of(const Vector& weights, int rank, int attempt, bool spoil, Vector* gradient) {
  std::mt19937 random(static_cast<unsigned>(attempt * 1000 + rank));
  std::normal_distribution<float> normal;
  float loss = 0;
  gradient->fill(0);
  for (int s = 0; s < kSamples; ++s) {
    Vector x;
    float error = 0;
    for (int i = 0; i < kFeatures; ++i) {
      x[i] = normal(random);
      error += (weights[i] - static_cast<float>(i + 1)) * x[i];
    }
    if (spoil && s == 0) error = std::numeric_limits<float>::quiet_NaN();
    for (int i = 0; i < kFeatures; ++i) (*gradient)[i] += 2 * error * x[i] / kSamples;
    loss += error * error / kSamples;
  }
  return loss;
}

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

  Vector weights{};
  Vector gradient{};
  const holdfast::BucketSlice layout{"weights", 0, kFeatures};
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    guard->begin();
    guard->run(Stage::kBackward, [&] {
      const bool spoil = attempt == kBadAttempt && rank == size - 1;
      guard->observe_loss(gradient_of(weights, rank, attempt, spoil, &gradient));
    });
    if (!guard->healthy()) gradient.fill(0);
    guard->observe(Stage::kBackward, "weights", TensorView::of(gradient));
    MPI_Allreduce(MPI_IN_PLACE, gradient.data(), kFeatures, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    guard->observe_share(TensorView::of(gradient), {&layout, 1});

    const Decision decision = guard->decide();
    if (decision.apply()) {
      guard->update([&] {
        for (int i = 0; i < kFeatures; ++i) weights[i] -= 0.1f * gradient[i] / static_cast<float>(size);
      });
    } else if (rank == 0) {
      std::printf("attempt %d: %s\n", attempt, decision.reason.c_str());
    }
    guard->finish();
    if (!decision.agreed) std::_Exit(decision.exit_code());  // others may be gone: no MPI_Finalize
    if (decision.ends_run()) return decision.exit_code();
  }
  const Decision end = guard->close();
  if (!end.agreed) std::_Exit(end.exit_code());
  float worst = 0;
  for (int i = 0; i < kFeatures; ++i)
    worst = std::fmax(worst, std::fabs(weights[i] - static_cast<float>(i + 1)));
  if (rank == 0) {
    std::printf("updates %llu of %d attempts, largest error of a weight %.6f\n",
                static_cast<unsigned long long>(guard->updates()), kAttempts, worst);
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
