// The MPI backend.
#pragma once

#include <mpi.h>

#include <memory>

#include "holdfast/collectives/collective.h"

namespace holdfast {

// Runs over a duplicate of the caller's communicator, so that nothing the caller does on its own can be
// mistaken for one of our messages. Needs MPI_THREAD_FUNNELED and is called from the thread that initialised
// MPI. Initialises and finalises nothing.
class MpiCollective final : public Collective {
 public:
  // Collective over `communicator`, which must be an intracommunicator and stays the caller's. MPI must be
  // initialised with at least MPI_THREAD_FUNNELED: USAGE otherwise.
  static Status create(MPI_Comm communicator, std::unique_ptr<Collective>* out);

  // Frees the duplicate, unless MPI is finalised already or the communicator failed. Destroy it on every rank.
  ~MpiCollective() override;

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  Status reduce(Record& record) override;
  Status gather(const Bytes& mine, std::vector<Bytes>* all) override;
  Status broadcast(Bytes* bytes) override;

 private:
  MpiCollective(MPI_Comm duplicate, int rank, int size)
      : communicator_(duplicate), rank_(rank), size_(size) {}

  Status check(int mpi_code, const char* operation);

  MPI_Comm communicator_;
  const int rank_;
  const int size_;
  Status failure_;  // sticky: after one failure MPI is not called again
};

}  // namespace holdfast
