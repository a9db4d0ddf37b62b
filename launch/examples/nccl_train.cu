// A guarded trainer in CUDA and NCCL, without a framework: a multilayer perceptron on Fashion-MNIST, one
// process a GPU.
//
//   mpirun -np 8 nccl_train --data /usr/share/datasets/fashion-mnist --run-dir run --inject-nan 50:3
//
// device_mlp.h is the model, device_replica.h an attempt on the GPU, and here is who decides: StepGuard, from
// the sum by which the GPU leaves the update out. MPI hands out NCCL's ids, and does nothing else.
// nccl_minimal.cu is the same without MPI and without StepGuard.
#include <mpi.h>

#include <cstdio>
#include <cstdlib>
#include <memory>

#include "examples/device_replica.h"
#include "holdfast/step_guard.h"

namespace holdfast::example {
namespace {

// Returns the exit code, the same on every rank.
int train(Replica& replica, const Options& options) {
  GuardOptions guard_options;
  guard_options.run_dir = options.run_dir;
  guard_options.before_leaving = [&] { replica.abort_gradients(); };
  std::unique_ptr<StepGuard> guard;
  if (Status s = StepGuard::create(replica.collective(), guard_options, &guard); !s.ok()) {
    std::fprintf(stderr, "%s\n", s.to_string().c_str());
    return s.exit_code();
  }
  for (std::uint64_t attempt = 0; attempt < options.steps; ++attempt) {
    guard->begin();
    replica.compute(attempt);
    // Enqueues the rest, the update with it, and waits for the verdict.
    const Decision decision = guard->decide(replica.attempt());
    if (decision.apply()) {
      guard->update([&] { replica.count_update(); });
    } else if (replica.rank() == 0) {
      std::printf("attempt %llu: %s\n", static_cast<unsigned long long>(attempt), decision.reason.c_str());
    }
    guard->finish();
    if (!decision.agreed) std::_Exit(decision.exit_code());  // others may be gone: no MPI_Finalize
    if (decision.ends_run()) return decision.exit_code();
    say_loss(replica, options, attempt);
  }
  const Decision end = guard->close();
  if (!end.agreed) std::_Exit(end.exit_code());
  return end.exit_code();
}

int run(Options options) {
  int rank = 0;
  int size = 0;
  int device = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  MPI_Comm node;
  MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &node);
  MPI_Comm_rank(node, &device);
  MPI_Comm_free(&node);

  Data data;
  Status status = prepare(&options, size, &data);
  int worst = device < gpus() ? status.exit_code() : 77;
  if (!status.ok()) std::fprintf(stderr, "rank %d: %s\n", rank, status.to_string().c_str());
  MPI_Allreduce(MPI_IN_PLACE, &worst, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
  if (worst == 77 && rank == 0) std::printf("not run: no GPU for each rank\n");
  if (worst != 0) return worst;

  Ids ids;
  for (Bytes* id : {&ids.gradients, &ids.verdicts}) {
    if (rank == 0) must(NcclCollective::make_id(id));
    MPI_Bcast(id->data(), static_cast<int>(id->size()), MPI_CHAR, 0, MPI_COMM_WORLD);
  }
  Replica replica(options, data, ids, rank, size, device);
  const int exit_code = train(replica, options);
  if (exit_code == 0) say_result(replica);
  return exit_code;
}

}  // namespace
}  // namespace holdfast::example

int main(int argc, char** argv) {
  holdfast::example::Options options;
  if (!holdfast::example::parse(argc, argv, &options)) {
    std::fputs(holdfast::example::kUsage, stderr);
    return 64;
  }
  int provided = 0;
  MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided);
  const int exit_code = holdfast::example::run(options);
  MPI_Finalize();
  return exit_code;
}
