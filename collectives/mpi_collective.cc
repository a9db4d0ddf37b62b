#include "holdfast/collectives/mpi_collective.h"

#include <climits>

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
  out->reset(new MpiCollective(duplicate, rank, size));
  return Status();
}

MpiCollective::~MpiCollective() {
  if (failure_.ok() && mpi_is_running()) MPI_Comm_free(&communicator_);
}

Status MpiCollective::check(int mpi_code, const char* operation) {
  if (mpi_code == MPI_SUCCESS) return Status();
  failure_ = Status(StatusCode::kRankMissing, std::string(operation) + " failed: " + mpi_error_text(mpi_code));
  return failure_;
}

Status MpiCollective::reduce(Record& record) {
  if (!failure_.ok()) return failure_;
  return check(MPI_Allreduce(MPI_IN_PLACE, record.lanes().data(), Record::kLanes, MPI_UINT64_T, MPI_SUM,
                             communicator_),
               "MPI_Allreduce");
}

Status MpiCollective::gather(const Bytes& mine, std::vector<Bytes>* all) {
  if (!failure_.ok()) return failure_;
  // The sizes in one collective, then a message from each rank that has something to say: what rank 0
  // receives grows with the number of bad ranks.
  const bool root = rank_ == 0;
  const std::uint64_t size = mine.size();
  std::vector<std::uint64_t> sizes(root ? static_cast<std::size_t>(size_) : 0);
  if (Status s = check(MPI_Gather(&size, 1, MPI_UINT64_T, sizes.data(), 1, MPI_UINT64_T, 0, communicator_),
                       "MPI_Gather");
      !s.ok()) {
    return s;
  }
  if (!root) {
    if (size == 0) return Status();
    if (size > INT_MAX) return check(MPI_ERR_COUNT, "gather of over 2 GiB from one rank");
    return check(MPI_Send(mine.data(), static_cast<int>(size), MPI_BYTE, 0, kGatherTag, communicator_),
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
                                  kGatherTag, communicator_, MPI_STATUS_IGNORE),
                         "MPI_Recv");
        !s.ok()) {
      return s;
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
