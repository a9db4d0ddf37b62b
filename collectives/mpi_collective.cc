#include "holdfast/collectives/mpi_collective.h"

#include <climits>

#include "byte_codec.h"

namespace holdfast {
namespace {

constexpr int kGatherTag = 1;

std::string mpi_error_text(int mpi_code) {
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  if (MPI_Error_string(mpi_code, text, &length) != MPI_SUCCESS) return "code " + std::to_string(mpi_code);
  return std::string(text, static_cast<std::size_t>(length));
}

bool mpi_is_running() {
  int initialized = 0;
  int finalized = 0;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  return initialized != 0 && finalized == 0;
}

}  // namespace

Status MpiCollective::create(MPI_Comm communicator, std::unique_ptr<Collective>* out) {
  if (!mpi_is_running()) return Status::usage("MPI is not initialised: call MPI_Init_thread first");
  int provided = MPI_THREAD_SINGLE;
  MPI_Query_thread(&provided);
  if (provided < MPI_THREAD_FUNNELED) {
    return Status::usage(
        "MPI was initialised with MPI_THREAD_SINGLE, but a watchdog thread runs beside it: "
        "call MPI_Init_thread with MPI_THREAD_FUNNELED");
  }
  MPI_Comm duplicate = MPI_COMM_NULL;
  if (const int code = MPI_Comm_dup(communicator, &duplicate); code != MPI_SUCCESS) {
    return Status::internal("MPI_Comm_dup: " + mpi_error_text(code));
  }
  MPI_Comm_set_errhandler(duplicate, MPI_ERRORS_RETURN);
  int rank = 0;
  int size = 0;
  MPI_Comm_rank(duplicate, &rank);
  MPI_Comm_size(duplicate, &size);
  std::unique_ptr<MpiCollective> made(new MpiCollective(duplicate, rank, size));
  if (Status s = made->split(); !s.ok()) return s;
  *out = std::move(made);
  return Status();
}

Status MpiCollective::split() {
  int node_rank = 0;
  if (Status s = check(MPI_Comm_split_type(communicator_, MPI_COMM_TYPE_SHARED, rank_, MPI_INFO_NULL, &node_),
                       "MPI_Comm_split_type");
      !s.ok()) {
    return s;
  }
  MPI_Comm_rank(node_, &node_rank);
  return check(MPI_Comm_split(communicator_, node_rank == 0 ? 0 : MPI_UNDEFINED, rank_, &leaders_),
               "MPI_Comm_split");
}

MpiCollective::~MpiCollective() {
  if (!failure_.ok() || !mpi_is_running()) return;
  for (MPI_Comm* communicator : {&leaders_, &node_, &communicator_}) {
    if (*communicator != MPI_COMM_NULL) MPI_Comm_free(communicator);
  }
}

Status MpiCollective::check(int mpi_code, const char* operation) {
  if (mpi_code == MPI_SUCCESS) return Status();
  failure_ =
      Status(StatusCode::kRankMissing, std::string(operation) + " failed: " + mpi_error_text(mpi_code));
  return failure_;
}

Status MpiCollective::reduce(Record& record) {
  if (!failure_.ok()) return failure_;
  return check(MPI_Allreduce(MPI_IN_PLACE, record.lanes().data(), Record::kLanes, MPI_UINT64_T, MPI_SUM,
                             communicator_),
               "MPI_Allreduce");
}

// The sizes in one collective, then a message from each rank that has something to say, to rank 0 of
// `communicator`.
Status MpiCollective::gather_over(MPI_Comm communicator, const Bytes& mine, std::vector<Bytes>* all) {
  int rank = 0;
  int ranks = 0;
  MPI_Comm_rank(communicator, &rank);
  MPI_Comm_size(communicator, &ranks);
  const std::uint64_t size = mine.size();
  std::vector<std::uint64_t> sizes(rank == 0 ? static_cast<std::size_t>(ranks) : 0);
  if (Status s = check(MPI_Gather(&size, 1, MPI_UINT64_T, sizes.data(), 1, MPI_UINT64_T, 0, communicator),
                       "MPI_Gather");
      !s.ok()) {
    return s;
  }
  if (rank != 0) {
    if (size == 0) return Status();
    if (size > INT_MAX) return check(MPI_ERR_COUNT, "gather of over 2 GiB from one rank");
    return check(MPI_Send(mine.data(), static_cast<int>(size), MPI_BYTE, 0, kGatherTag, communicator),
                 "MPI_Send");
  }
  all->assign(sizes.size(), Bytes());
  all->front() = mine;
  for (std::size_t r = 1; r < sizes.size(); ++r) {
    if (sizes[r] == 0) continue;
    if (sizes[r] > INT_MAX) return check(MPI_ERR_COUNT, "gather of over 2 GiB from one rank");
    Bytes& bytes = (*all)[r];
    bytes.resize(sizes[r]);
    if (Status s = check(MPI_Recv(bytes.data(), static_cast<int>(bytes.size()), MPI_BYTE, static_cast<int>(r),
                                  kGatherTag, communicator, MPI_STATUS_IGNORE),
                         "MPI_Recv");
        !s.ok()) {
      return s;
    }
  }
  return Status();
}

Status MpiCollective::gather(const Bytes& mine, std::vector<Bytes>* all, int most_per_node) {
  if (!failure_.ok()) return failure_;
  // Each message travels with its rank, since a node's ranks need not be neighbours.
  ByteWriter own;
  if (!mine.empty()) own.u32(static_cast<std::uint32_t>(rank_)).text(mine);
  std::vector<Bytes> of_node;
  if (Status s = gather_over(node_, own.take(), &of_node); !s.ok()) return s;
  if (leaders_ == MPI_COMM_NULL) return Status();

  Bytes relayed;
  int kept = 0;
  for (const Bytes& bytes : of_node) {
    if (bytes.empty() || kept == most_per_node) continue;
    relayed += bytes;
    ++kept;
  }
  std::vector<Bytes> of_nodes;
  if (Status s = gather_over(leaders_, relayed, &of_nodes); !s.ok()) return s;
  if (rank_ != 0) return Status();

  all->assign(static_cast<std::size_t>(size_), Bytes());
  for (std::size_t node = 0; node < of_nodes.size(); ++node) {
    if (node != 0 && !of_nodes[node].empty()) {
      ++traffic_.messages;
      traffic_.bytes += of_nodes[node].size();
    }
    ByteReader reader(of_nodes[node]);
    while (reader.ok() && !reader.done()) {
      const std::uint32_t rank = reader.u32();
      const std::string_view bytes = reader.text();
      if (reader.ok() && rank < all->size()) (*all)[rank] = bytes;
    }
  }
  return Status();
}

Status MpiCollective::broadcast(Bytes* bytes) {
  if (!failure_.ok()) return failure_;
  std::uint64_t size = bytes->size();
  if (Status s = check(MPI_Bcast(&size, 1, MPI_UINT64_T, 0, communicator_), "MPI_Bcast"); !s.ok()) return s;
  if (size > INT_MAX) return check(MPI_ERR_COUNT, "broadcast of over 2 GiB");
  bytes->resize(size);
  return check(MPI_Bcast(bytes->data(), static_cast<int>(size), MPI_BYTE, 0, communicator_), "MPI_Bcast");
}

}  // namespace holdfast
