#include "state_sweep.h"

#include <xxhash.h>

#include <cstring>
#include <utility>

#include "holdfast/fused_scan.h"

namespace holdfast {

StateSweep::StateSweep(const TrainingState& state, bool prove_optimizer_state) {
  for (const StateTensor& tensor : state.tensors()) {
    const bool proven =
        tensor.held == Held::kReplicated && (prove_optimizer_state || !tensor.is_optimizer_state);
    Item& item = items_.emplace_back(Item{&tensor, proven, {}});
    if (tensor.forward_mutates) item.copy.resize(static_cast<std::size_t>(tensor.bytes()));
  }
}

void StateSweep::begin(Scope scope) {
  for (Item& item : items_) {
    if (!item.copy.empty()) std::memcpy(item.copy.data(), item.tensor->data, item.copy.size());
  }
  running_ = true;
  thread_.submit([this, scope] { read(scope); });
}

void StateSweep::read(Scope scope) {
  result_ = Result();
  result_.digests.reserve(items_.size());
  for (const Item& item : items_) {
    if (scope == Scope::kReplicas && !item.proven) continue;
    TensorView view = item.tensor->view();
    if (!item.copy.empty()) view.data = item.copy.data();
    Digest128 digest;
    const Probe probe = scan_and_digest(view, &digest);
    if (item.tensor->must_be_finite && !probe.finite())
      result_.non_finite.push_back({item.tensor->name, probe});
    if (item.proven) result_.digests.push_back(digest.low ^ digest.high);
  }
  result_.proof = XXH3_64bits(result_.digests.data(), result_.digests.size() * sizeof(std::uint64_t));
}

StateSweep::Result StateSweep::finish() {
  thread_.wait();
  running_ = false;
  return std::move(result_);
}

std::vector<std::string> StateSweep::proven() const {
  std::vector<std::string> names;
  for (const Item& item : items_) {
    if (item.proven) names.push_back(item.tensor->name);
  }
  return names;
}

}  // namespace holdfast
