// Collectives that stand in front of a real one: to watch it, or to be the network that fails.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "holdfast/collectives/collective.h"

namespace holdfast {

class CollectiveDecorator : public Collective {
 public:
  explicit CollectiveDecorator(Collective& inner) : inner_(inner) {}
  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  Status reduce(Record& record) override { return inner_.reduce(record); }
  Status gather(const Bytes& mine, std::vector<Bytes>* all, int most_per_node) override {
    return inner_.gather(mine, all, most_per_node);
  }
  Status broadcast(Bytes* bytes) override { return inner_.broadcast(bytes); }

 private:
  Collective& inner_;
};

// Writes down the sequence of operations: R, G, B.
class RecordingCollective final : public CollectiveDecorator {
 public:
  using CollectiveDecorator::CollectiveDecorator;
  Status reduce(Record& record) override {
    calls += 'R';
    return CollectiveDecorator::reduce(record);
  }
  Status gather(const Bytes& mine, std::vector<Bytes>* all, int most_per_node) override {
    calls += 'G';
    sent += mine.size();
    return CollectiveDecorator::gather(mine, all, most_per_node);
  }
  Status broadcast(Bytes* bytes) override {
    calls += 'B';
    return CollectiveDecorator::broadcast(bytes);
  }
  std::string calls;
  std::size_t sent = 0;  // bytes passed to gather
};

// Once armed with R, G or B, fails that operation: instead of taking part in it, or after it, so that only
// this rank does not get the result.
class FailingCollective final : public CollectiveDecorator {
 public:
  using CollectiveDecorator::CollectiveDecorator;
  Status reduce(Record& record) override {
    return fail('R', [&] { return CollectiveDecorator::reduce(record); });
  }
  Status gather(const Bytes& mine, std::vector<Bytes>* all, int most_per_node) override {
    return fail('G', [&] { return CollectiveDecorator::gather(mine, all, most_per_node); });
  }
  Status broadcast(Bytes* bytes) override {
    return fail('B', [&] { return CollectiveDecorator::broadcast(bytes); });
  }
  char armed = '-';
  bool takes_part = false;

 private:
  Status fail(char operation, const std::function<Status()>& real) {
    if (operation != armed) return real();
    if (takes_part) static_cast<void>(real());
    return {StatusCode::kRankMissing, "link down"};
  }
};

// Once armed, changes what arrives.
class CorruptingCollective final : public CollectiveDecorator {
 public:
  using CollectiveDecorator::CollectiveDecorator;
  Status reduce(Record& record) override {
    Status status = CollectiveDecorator::reduce(record);
    if (change_sum) change_sum(record);
    return status;
  }
  Status broadcast(Bytes* bytes) override {
    Status status = CollectiveDecorator::broadcast(bytes);
    if (change_broadcast) change_broadcast(*bytes);
    return status;
  }
  std::function<void(Record&)> change_sum;
  std::function<void(Bytes&)> change_broadcast;
};

}  // namespace holdfast
