#include "layer_history.h"

#include <algorithm>

#include "holdfast/coord/evidence/evidence.pb.h"
#include "probe_message.h"

namespace holdfast {
namespace {

constexpr std::size_t kMostAttempts = 8;  // of a trend: before and after a doubling it is still seen
constexpr std::size_t kMostLayers = 4096;

}  // namespace

void LayerHistory::begin(std::uint64_t epoch, std::uint64_t attempt) {
  if (measures_) last_.pop_back();  // it was not finished: it will be made again
  measures_ = left_ > 0;
  if (!measures_) return;
  --left_;
  if (last_.size() == kMostAttempts) last_.pop_front();
  last_.push_back({epoch, attempt, {}});
}

LayerHistory::Layer* LayerHistory::find(Stage stage, std::string_view tensor) {
  Attempt& now = last_.back();
  const auto same = [&](const Layer& layer) { return layer.stage == stage && layer.tensor == tensor; };
  if (now.next < now.layers.size() && same(now.layers[now.next])) return &now.layers[now.next++];
  const auto found = std::ranges::find_if(now.layers, same);
  if (found == now.layers.end()) return nullptr;
  now.next = static_cast<std::size_t>(found - now.layers.begin()) + 1;
  return &*found;
}

void LayerHistory::add(Stage stage, EvidenceRecorder::Kind kind, std::string_view tensor, DType dtype,
                       const Probe& probe, bool scaled) {
  if (!measures_) return;
  if (Layer* layer = find(stage, tensor)) {
    Probe& all = layer->probe;
    if (all.first_bad < 0) all.first_bad = probe.first_bad;
    all.count += probe.count;
    all.bad += probe.bad;
    all.abs_max = std::max(all.abs_max, probe.abs_max);
    all.squares += probe.squares;
    return;
  }
  if (last_.back().layers.size() < kMostLayers)
    last_.back().layers.push_back({stage, kind, std::string(tensor), dtype, probe, scaled});
}

void LayerHistory::describe(const Attempt& attempt, LayerAttempt* to) {
  to->set_epoch(attempt.epoch);
  to->set_attempt(attempt.attempt);
  for (const Layer& layer : attempt.layers)
    put_probe(layer.stage, layer.kind, layer.tensor, layer.dtype, layer.probe, -1, layer.scaled,
              to->add_layers());
}

bool LayerHistory::end(LayerAttempt* to) {
  if (!measures_) return false;
  measures_ = false;
  describe(last_.back(), to);
  return true;
}

void LayerHistory::put(EvidencePart* part) const {
  for (const Attempt& attempt : last_) describe(attempt, part->add_trend());
}

}  // namespace holdfast
