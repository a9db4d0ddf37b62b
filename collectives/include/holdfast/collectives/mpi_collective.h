// The MPI backend.
#pragma once

#include <mpi.h>

#include <memory>

#include "holdfast/collectives/collective.h"

namespace holdfast {

// What gather() moved over the network to this rank. Grows on rank 0 with the number of bad ranks, up to the
// cap.
struct GatherTraffic {
  std::uint64_t messages = 0;  // between nodes, not counting the sizes
  std::uint64_t bytes = 0;
};

// Runs over a duplicate of the caller's communicator, so that nothing the caller does on its own can be
// mistaken for one of our messages. Needs MPI_THREAD_FUNNELED and is called from the thread that initialised
// MPI. Initialises and finalises nothing.
class MpiCollective final : public Collective {
 public:
  // Collective over `communicator`, which must be an intracommunicator and stays the caller's. MPI must be
  // initialised with at least MPI_THREAD_FUNNELED: USAGE otherwise.
  static Status create(MPI_Comm communicator, std::unique_ptr<Collective>* out);

  // Frees the duplicate, unless MPI is finalised already or the communicator failed. Destroy it on every
  // rank.
  ~MpiCollective() override;

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  Status reduce(Record& record) override;
  using Collective::gather;
  // Two levels: from the ranks of a node to its first rank, from there to rank 0.
  Status gather(const Bytes& mine, std::vector<Bytes>* all, int most_per_node) override;
  Status broadcast(Bytes* bytes) override;

  const GatherTraffic& gather_traffic() const { return traffic_; }

 private:
  MpiCollective(MPI_Comm duplicate, int rank, int size)
      : communicator_(duplicate), rank_(rank), size_(size) {}

  Status split();
  Status check(int mpi_code, const char* operation);
  Status gather_over(MPI_Comm communicator, const Bytes& mine, std::vector<Bytes>* all);

  MPI_Comm communicator_;
  MPI_Comm node_ = MPI_COMM_NULL;     // ranks of this node
  MPI_Comm leaders_ = MPI_COMM_NULL;  // the first rank of each node; null elsewhere
  const int rank_;
  const int size_;
  GatherTraffic traffic_;
  Status failure_;  // sticky: after one failure MPI is not called again
};

}  // namespace holdfast
