// A program whose MPI was not started as the backend needs it is told so: before MPI_Init, with
// MPI_THREAD_SINGLE, and after MPI_Finalize. Returns 0 when each was refused.
#include <cstdio>

#include "holdfast/collectives/mpi_collective.h"

namespace {

bool refused(const char* when, const char* advice) {
  std::unique_ptr<holdfast::Collective> collective;
  const holdfast::Status status = holdfast::MpiCollective::create(MPI_COMM_WORLD, &collective);
  const bool good = status.code() == holdfast::StatusCode::kUsage && !collective &&
                    status.message().find(advice) != std::string::npos;
  if (!good)
    std::fprintf(stderr, "%s: expected USAGE that says %s, got %s\n", when, advice,
                 status.to_string().c_str());
  return good;
}

}  // namespace

int main(int argc, char** argv) {
  bool good = refused("before MPI_Init", "not initialised");
  int provided = MPI_THREAD_MULTIPLE;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_SINGLE, &provided);
  if (provided != MPI_THREAD_SINGLE) {
    std::fprintf(stderr, "this MPI gives more than MPI_THREAD_SINGLE when asked for it\n");
    good = false;
  }
  good = refused("with MPI_THREAD_SINGLE", "MPI_THREAD_FUNNELED") && good;
  MPI_Finalize();
  good = refused("after MPI_Finalize", "MPI_Init") && good;
  return good ? 0 : 1;
}
