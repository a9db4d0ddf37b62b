#include "holdfast/collectives/nccl_collective.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <climits>
#include <cstring>
#include <map>
#include <new>

#include "nccl_link.h"

namespace holdfast {
namespace {

constexpr std::size_t kNodeBytes = 64;
using NodeName = std::array<char, kNodeBytes>;

Status check_node(const std::string& node) {
  if (node.size() <= kNodeBytes) return Status();
  return Status::usage("NcclOptions::node has " + std::to_string(node.size()) + " bytes, but at most " +
                       std::to_string(kNodeBytes) + " tell nodes apart");
}

// What `call` returns, as a Status of a call that is made before there is a communicator of ours.
Status local(ncclResult_t code, const char* what) {
  if (code == ncclSuccess) return Status();
  return Status::internal(std::string(what) + ": " + ncclGetErrorString(code) + ": " +
                          ncclGetLastError(nullptr));
}

Status local(cudaError_t code, const char* what) {
  if (code == cudaSuccess) return Status();
  return Status::internal(std::string(what) + ": " + cudaGetErrorString(code));
}

}  // namespace

// ---- creation

Status NcclCollective::make_id(Bytes* id) {
  ncclUniqueId made;
  if (Status s = local(ncclGetUniqueId(&made), "ncclGetUniqueId"); !s.ok()) return s;
  id->assign(made.internal, sizeof(made.internal));
  return Status();
}

Status NcclCollective::create(const Bytes& id, int rank, int size, int device, const NcclOptions& options,
                              std::unique_ptr<NcclCollective>* out) {
  if (Status s = check_node(options.node); !s.ok()) return s;
  ncclUniqueId theirs;
  if (id.size() != sizeof(theirs.internal)) {
    return Status::usage("a NCCL id has " + std::to_string(sizeof(theirs.internal)) + " bytes, this one " +
                         std::to_string(id.size()) + ": was it made by make_id(), and handed out whole?");
  }
  if (id.find_first_not_of('\0') == Bytes::npos)
    return Status::usage("the NCCL id is all zeros: none was made, see what make_id() said on its rank");
  if (size < 1 || rank < 0 || rank >= size) {
    return Status::usage("rank " + std::to_string(rank) + " of " + std::to_string(size) + " ranks");
  }
  std::memcpy(theirs.internal, id.data(), id.size());
  const auto link = std::make_shared<NcclLink>(options.deadline);
  Status s = link->allocate(device, size);
  if (s.ok()) s = link->connect(theirs, rank, size);
  // From here on its destructor ends what there is.
  std::unique_ptr<NcclCollective> made(new NcclCollective(link));
  if (s.ok()) s = made->meet(options.node);
  if (s.ok()) *out = std::move(made);
  return s;
}

Status NcclCollective::create(ncclComm* communicator, const NcclOptions& options,
                              std::unique_ptr<NcclCollective>* out) {
  if (Status s = check_node(options.node); !s.ok()) return s;
  int rank = 0;
  int size = 0;
  int device = 0;
  Status s = local(ncclCommUserRank(communicator, &rank), "ncclCommUserRank");
  if (s.ok()) s = local(ncclCommCount(communicator, &size), "ncclCommCount");
  if (s.ok()) s = local(ncclCommCuDevice(communicator, &device), "ncclCommCuDevice");
  if (!s.ok()) return s;
  const auto link = std::make_shared<NcclLink>(options.deadline);
  s = link->allocate(device, size);
  if (s.ok()) s = link->split(communicator, rank, size);
  std::unique_ptr<NcclCollective> made(new NcclCollective(link));
  if (s.ok()) s = made->meet(options.node);
  if (s.ok()) *out = std::move(made);
  return s;
}

NcclCollective::NcclCollective(std::shared_ptr<NcclLink> link)
    : link_(std::move(link)), rank_(link_->rank()), size_(link_->size()) {}

NcclCollective::~NcclCollective() { link_->close(); }

// Who shares a node, and a first reduction: NCCL connects ranks when they first need it, which a capture may
// not allow for.
Status NcclCollective::meet(const std::string& node) {
  std::vector<NodeName> names(static_cast<std::size_t>(size_));
  NodeName& mine = names[static_cast<std::size_t>(rank_)];
  mine.fill('\0');
  if (node.empty()) {
    char host[256] = "?";
    gethostname(host, sizeof(host) - 1);
    std::memcpy(mine.data(), host, std::min(std::strlen(host), kNodeBytes));
  } else {
    std::copy(node.begin(), node.end(), mine.begin());
  }
  if (Status s = all_gather(names.data(), sizeof(NodeName)); !s.ok()) return s;
  std::map<NodeName, int> first;
  for (std::size_t r = 0; r < names.size(); ++r) {
    nodes_.push_back(first.emplace(names[r], static_cast<int>(r)).first->second);
  }
  Record nothing;
  return reduce(nothing);
}

// ---- the three collectives

Status NcclCollective::reduce(Record& record) {
  NcclLink& link = *link_;
  if (Status s = link.put(record.lanes().data(), sizeof(Record)); !s.ok()) return s;
  Status s = link.run("ncclAllReduce", [&](ncclComm_t communicator) {
    return ncclAllReduce(link.device(), link.device(), Record::kLanes, ncclUint64, ncclSum, communicator,
                         link.stream());
  });
  return s.ok() ? link.take(record.lanes().data(), sizeof(Record)) : s;
}

// `entries` are size() entries of `width` bytes, of which this rank's is set.
Status NcclCollective::all_gather(void* entries, std::size_t width) {
  NcclLink& link = *link_;
  const std::size_t at = static_cast<std::size_t>(rank_) * width;
  if (Status s = link.put(static_cast<std::byte*>(entries) + at, width, at); !s.ok()) return s;
  Status s = link.run("ncclAllGather", [&](ncclComm_t communicator) {
    return ncclAllGather(link.device() + at, link.device(), width, ncclUint8, communicator, link.stream());
  });
  return s.ok() ? link.take(entries, static_cast<std::size_t>(size_) * width) : s;
}

// Of each node the first `most_per_node` ranks that have something to say.
std::vector<bool> NcclCollective::kept(const std::vector<std::uint64_t>& sizes, int most_per_node) const {
  std::vector<bool> keep(sizes.size());
  std::vector<int> of_node(sizes.size());
  for (std::size_t r = 0; r < sizes.size(); ++r) {
    int& count = of_node[static_cast<std::size_t>(nodes_[r])];
    keep[r] = sizes[r] > 0 && count < most_per_node;
    if (keep[r]) ++count;
  }
  return keep;
}

Status NcclCollective::gather(const Bytes& mine, std::vector<Bytes>* all, int most_per_node) {
  std::vector<std::uint64_t> sizes(static_cast<std::size_t>(size_));
  sizes[static_cast<std::size_t>(rank_)] = mine.size();
  if (Status s = all_gather(sizes.data(), sizeof(sizes[0])); !s.ok()) return s;
  const std::vector<bool> keep = kept(sizes, most_per_node);
  if (rank_ != 0) return keep[static_cast<std::size_t>(rank_)] ? send_to_root(mine) : Status();

  std::vector<Bytes> gathered(sizes.size());
  if (keep[0]) gathered[0] = mine;
  for (std::size_t r = 1; r < sizes.size(); ++r) {
    if (!keep[r]) continue;
    if (Status s = make_room(sizes[r], &gathered[r]); !s.ok()) return s;
    if (Status s = receive_from(static_cast<int>(r), &gathered[r]); !s.ok()) return s;
  }
  *all = std::move(gathered);
  return Status();
}

// Others wait for this rank in the next step: without memory for it the group has failed.
Status NcclCollective::make_room(std::uint64_t size, Bytes* bytes) {
  if (size > INT_MAX) return link_->fail("a message of over 2 GiB");
  try {
    bytes->resize(size);
    return Status();
  } catch (const std::bad_alloc&) {
    return link_->fail("no memory for a message of " + std::to_string(size) + " bytes");
  }
}

Status NcclCollective::send_to_root(const Bytes& bytes) {
  NcclLink& link = *link_;
  for (std::size_t at = 0; at < bytes.size(); at += NcclLink::kChunk) {
    const std::size_t size = std::min(NcclLink::kChunk, bytes.size() - at);
    if (Status s = link.put(bytes.data() + at, size); !s.ok()) return s;
    Status s = link.run("ncclSend", [&](ncclComm_t communicator) {
      return ncclSend(link.device(), size, ncclUint8, 0, communicator, link.stream());
    });
    if (s.ok()) s = link.take(nullptr, 0);
    if (!s.ok()) return s;
  }
  return Status();
}

Status NcclCollective::receive_from(int rank, Bytes* bytes) {
  NcclLink& link = *link_;
  for (std::size_t at = 0; at < bytes->size(); at += NcclLink::kChunk) {
    const std::size_t size = std::min(NcclLink::kChunk, bytes->size() - at);
    Status s = link.run("ncclRecv", [&](ncclComm_t communicator) {
      return ncclRecv(link.device(), size, ncclUint8, rank, communicator, link.stream());
    });
    if (s.ok()) s = link.take(bytes->data() + at, size);
    if (!s.ok()) return s;
  }
  return Status();
}

Status NcclCollective::broadcast(Bytes* bytes) {
  NcclLink& link = *link_;
  const auto from_root = [&](void* data, std::size_t size) {
    Status s = rank_ == 0 ? link.put(data, size) : Status();
    if (!s.ok()) return s;
    s = link.run("ncclBroadcast", [&](ncclComm_t communicator) {
      return ncclBroadcast(link.device(), link.device(), size, ncclUint8, 0, communicator, link.stream());
    });
    return s.ok() ? link.take(data, size) : s;
  };
  std::uint64_t size = bytes->size();
  if (Status s = from_root(&size, sizeof(size)); !s.ok()) return s;
  Bytes told;
  if (Status s = make_room(size, &told); !s.ok()) return s;
  if (rank_ == 0) told = *bytes;
  for (std::size_t at = 0; at < size; at += NcclLink::kChunk) {
    Status s = from_root(told.data() + at, std::min<std::size_t>(NcclLink::kChunk, size - at));
    if (!s.ok()) return s;
  }
  *bytes = std::move(told);
  return Status();
}

// ---- on the caller's stream

Status NcclCollective::reduce_on(CUstream_st* stream, std::uint64_t* device_record) {
  NcclLink& link = *link_;
  Status s = link.run("ncclAllReduce", [&](ncclComm_t communicator) {
    return ncclAllReduce(device_record, device_record, Record::kLanes, ncclUint64, ncclSum, communicator,
                         stream);
  });
  if (!s.ok()) return s;
  return link.check(
      static_cast<cudaError_t>(cuda::launch_publish(device_record, static_cast<std::uint64_t>(size_),
                                                    link.verdict(), link.board(), stream)),
      "cudaLaunchKernel");
}

const std::uint32_t* NcclCollective::device_skip_flag() const { return &link_->verdict()->skip; }

// On the stream, as the kernel that writes it otherwise.
Status NcclCollective::raise_skip_flag(CUstream_st* stream) {
  return local(cudaMemcpyAsync(&link_->verdict()->skip, &link_->board()->up, sizeof(link_->board()->up),
                               cudaMemcpyHostToDevice, stream),
               "cudaMemcpyAsync");
}

Status NcclCollective::launch(const std::function<Status()>& graph) {
  Status launched;
  const Status made = link_->run("the launch of a graph", [&](ncclComm_t) {
    launched = graph();
    return ncclSuccess;
  });
  return made.ok() ? launched : made;
}

Status NcclCollective::wait(Record* sum) {
  static_assert(kUnread == cuda::SumBoard::kSlots - 1, "while one slot is written, the others can be read");
  NcclLink& link = *link_;
  if (!link.failure().ok()) return link.failure();
  const std::atomic_ref<std::uint64_t> written(link.board()->sums);
  Status s = link.poll("the verdict on the device", [&](bool* done) {
    *done = written.load(std::memory_order_acquire) > read_;
    // The stream is idle, and yet tells when the device is lost.
    const cudaError_t code = cudaStreamQuery(link.stream());
    if (code != cudaSuccess && code != cudaErrorNotReady) return link.check(code, "cudaStreamQuery");
    return link.look_around();
  });
  if (!s.ok()) return s;
  Record read;
  std::memcpy(read.lanes().data(), link.board()->lanes[read_ % cuda::SumBoard::kSlots], sizeof(Record));
  const std::uint64_t unread = written.load(std::memory_order_acquire) - read_;
  if (unread > kUnread) {
    return Status::usage(std::to_string(unread) + " sums are unread, of which at most " +
                         std::to_string(kUnread) + " are kept: wait() for each reduce_on()");
  }
  ++read_;
  *sum = read;
  return Status();
}

Status NcclCollective::health() { return link_->health(); }

void NcclCollective::abort() noexcept { link_->abort(); }

}  // namespace holdfast
