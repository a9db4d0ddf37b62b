// The NCCL backend: the verdict on the GPUs' own network, and without the host when the host is not needed.
// The header needs neither CUDA nor NCCL; the target is holdfast::nccl.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "holdfast/collectives/collective.h"

struct CUstream_st;  // what a cudaStream_t points to
struct ncclComm;     // what a ncclComm_t points to

namespace holdfast {

class NcclLink;

struct NcclOptions {
  // For the creation, and for each step of a collective. A rank that is merely late must make it, and one
  // that is stuck is the watchdog's affair, so this is long. It holds where the watchdog waits, too: longer
  // than the slowest rank takes beyond the others to read a checkpoint, or to evaluate.
  std::chrono::milliseconds deadline{std::chrono::minutes(10)};
  // Ranks with the same text share a node, see gather(). At most 64 bytes; empty: the host's name.
  std::string node;
};

// Runs over a communicator of its own, so that nothing the caller does can be mistaken for one of our
// messages. The communicator does not block: whatever takes time is polled, together with its asynchronous
// error, the deadline and abort(). Called from one thread, on which the rank's device is current (the
// creation makes it so); health() and abort() from any. NCCL gets one call at a time, whichever thread makes
// it.
//
// A failure of NCCL or CUDA, a deadline and abort() are all RANK_MISSING, for good: the communicator is
// aborted at once, nothing more is enqueued, and what was received is not handed out.
class NcclCollective final : public Collective {
 public:
  // Local, on one rank, which hands the id to all others: over MPI, a socket, a file.
  static Status make_id(Bytes* id);

  // Collective over the `size` ranks that got the same id. `device` is this rank's alone: NCCL wants each
  // rank on a GPU of its own. USAGE for arguments that cannot be right, INTERNAL when the device's memory
  // cannot be had, RANK_MISSING when a rank does not come.
  static Status create(const Bytes& id, int rank, int size, int device, const NcclOptions& options,
                       std::unique_ptr<NcclCollective>* out);

  // Collective over `communicator`, which stays the caller's and is split, not used: same ranks, same device.
  // It should not block, else the deadline cannot be kept; when this fails it may be in the middle of the
  // split, and is best aborted.
  static Status create(ncclComm* communicator, const NcclOptions& options,
                       std::unique_ptr<NcclCollective>* out);

  // Waits for the other ranks to be done with theirs, at most for the deadline, and for half a minute. After
  // a failure it waits for nobody: what does not let go in two seconds is left behind, with its memory.
  ~NcclCollective() override;

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  Status reduce(Record& record) override;
  using Collective::gather;
  // The sizes go to every rank, so that each knows whose bytes travel, to rank 0 alone.
  Status gather(const Bytes& mine, std::vector<Bytes>* all, int most_per_node) override;
  Status broadcast(Bytes* bytes) override;

  // The same reduction where the gradients are reduced: on the caller's stream, of a record in device memory
  // (32 lanes, in place), with nothing waited for. Behind it device_skip_flag() is that of the sum, and
  // wait() can read it. Can be captured in a CUDA graph, which must be destroyed before this is; each replay
  // is one more reduction. Keep to one stream. When it fails, do not enqueue what depends on the flag.
  Status reduce_on(CUstream_st* stream, std::uint64_t* device_record);

  // In device memory: 1 unless the verdict of the latest sum is clean, as judge() sees it; 1 before the
  // first, and for a sum that an abort cut short. For an optimizer kernel that is to leave an update out.
  const std::uint32_t* device_skip_flag() const;
  // Enqueues that it is up, where the sum that was due has not been enqueued. INTERNAL when that fails.
  Status raise_skip_flag(CUstream_st* stream);

  // Calls `graph`, which launches one with a captured reduce_on(), and gives what that gives or throws. An
  // abort waits for it, as for a call of NCCL's. RANK_MISSING once the communicator is lost: nothing was
  // launched, or it was while the abort came, and the flag behind it is up. `graph` may call reduce_on()
  // itself.
  Status launch(const std::function<Status()>& graph);

  // Waits for the oldest sum that was not read yet, once for each reduce_on() and replay. May be late, but
  // not by more than kUnread sums: USAGE when one was overwritten.
  Status wait(Record* sum);
  static constexpr std::uint64_t kUnread = 7;

  // The communicator's asynchronous error, and any failure that was met before, for the watchdog. NCCL is
  // asked on a thread of this object's own, for its answer may take time: the failure that one call has asked
  // for is given by the next. A NCCL that does not answer is no failure by itself; as nobody else may call it
  // meanwhile, the attempt's deadline finds it. Not during the destruction.
  Status health() override;

  // Ends whatever this rank is in the middle of, and the communicator, with ncclCommAbort: the thread in it
  // gets RANK_MISSING. A call of NCCL's that another thread is in is given a second to end first. Not during
  // the destruction.
  void abort() noexcept override;

 private:
  explicit NcclCollective(std::shared_ptr<NcclLink> link);
  Status meet(const std::string& node);
  Status all_gather(void* entries, std::size_t width);
  std::vector<bool> kept(const std::vector<std::uint64_t>& sizes, int most_per_node) const;
  Status make_room(std::uint64_t size, Bytes* bytes);
  Status send_to_root(const Bytes& bytes);
  Status receive_from(int rank, Bytes* bytes);

  const std::shared_ptr<NcclLink> link_;  // shared with threads that end it
  const int rank_;
  const int size_;
  std::vector<int> nodes_;  // by rank: the first rank of its node
  std::uint64_t read_ = 0;  // sums that wait() gave
};

}  // namespace holdfast
