// The backend over a caller's own transport.
#pragma once

#include <memory>
#include <vector>

#include "holdfast/collectives/callbacks.h"
#include "holdfast/collectives/collective.h"

namespace holdfast {

// Each reduce() is one all_reduce of Record::kLanes values. gather() and broadcast() begin with an all_reduce
// of the sizes; without functions of their own they then move the bytes in all_reduces of at most
// kChunkValues values, which costs every rank as much as rank 0: fine for the rare attempts that are not
// clean, on some hundreds of ranks.
class CallbackCollective final : public Collective {
 public:
  static constexpr std::size_t kChunkValues = std::size_t{1} << 15;  // 256 KiB

  // Local. Copies the struct; what `context` points to must outlive the object. USAGE for a struct of another
  // version, a rank outside of the group, or without all_reduce.
  static Status create(const holdfast_callbacks& callbacks, std::unique_ptr<Collective>* out);

  int rank() const override { return callbacks_.rank; }
  int size() const override { return callbacks_.size; }
  // On failure the arguments are as they were, of all three.
  Status reduce(Record& record) override;
  using Collective::gather;
  Status gather(const Bytes& mine, std::vector<Bytes>* all, int most_per_node) override;
  Status broadcast(Bytes* bytes) override;

 private:
  explicit CallbackCollective(const holdfast_callbacks& callbacks);

  template <typename Function>
  Status call(const char* name, Function&& function);
  Status all_reduce(std::uint64_t* values, std::size_t count);
  Status fail(std::string message);
  Status agree_on_sizes(std::uint64_t mine, int most_per_node, std::vector<std::uint64_t>* sizes);
  Status gather_by_sums(const Bytes& mine, const std::vector<std::uint64_t>& sizes, std::vector<Bytes>* all);
  Status broadcast_by_sums(Bytes* bytes);

  const holdfast_callbacks callbacks_;
  const std::uint64_t node_;
  Status failure_;  // sticky: after one failure nothing is called again
};

}  // namespace holdfast
