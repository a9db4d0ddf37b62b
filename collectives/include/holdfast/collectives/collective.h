// How ranks talk: three blocking collectives. Every backend passes one conformance suite.
#pragma once

#include <cstddef>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "holdfast/collectives/record.h"
#include "holdfast/collectives/status.h"

namespace holdfast {

using Bytes = std::string;  // opaque bytes, not text

// A group of ranks 0..size()-1. The three operations are collective: every rank of the group calls the same
// ones in the same order, from one thread at a time. A failure means that the group can no longer be relied
// on: the ranks may have seen different results, and nothing may be applied.
class Collective {
 public:
  virtual ~Collective() = default;
  Collective(const Collective&) = delete;
  Collective& operator=(const Collective&) = delete;

  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Sums `record` over all ranks, lane by lane mod 2^64; every rank gets the same bits.
  virtual Status reduce(Record& record) = 0;

  // Rank 0 gets size() entries, entry r being what rank r passed, possibly empty; other ranks get none. Of
  // each node (ranks that share memory) only the first `most_per_node` entries that are not empty arrive; the
  // others come out empty.
  virtual Status gather(const Bytes& mine, std::vector<Bytes>* all, int most_per_node) = 0;
  Status gather(const Bytes& mine, std::vector<Bytes>* all) {
    return gather(mine, all, std::numeric_limits<int>::max());
  }

  // Every rank gets what rank 0 passed.
  virtual Status broadcast(Bytes* bytes) = 0;

  // Says what is wrong with the transport, without waiting for the next operation to find out: RANK_MISSING,
  // and from then on always; ok while nothing is known. For the watchdog, which asks at every tick. Any
  // thread, also while another is inside an operation. Never blocks: what may is done on a thread of the
  // backend's own, and its answer given when it is there.
  virtual Status health() { return Status(); }

  // Ends the transport on this rank, so that who waits in it returns with a failure, as far as that can be
  // done. Any thread, any number of times; takes two seconds at most. Without effect where a transport has
  // no such thing.
  virtual void abort() noexcept {}

 protected:
  Collective() = default;
};

// Makes every rank learn that any rank failed. Collective. Returns, on every rank, the failure of the lowest
// rank that has one ("rank 2: ..."), or ok. For start-up work that may fail on some ranks only: a missing
// file on one host, a lock that rank 0 cannot get.
Status agree_on_status(Collective& collective, const Status& mine);

}  // namespace holdfast
