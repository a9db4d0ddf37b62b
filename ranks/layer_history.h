// What the layers of this rank made in the attempts after an incident. Costs nothing in others.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include "holdfast/collectives/record.h"
#include "holdfast/evidence.h"
#include "holdfast/scan.h"

namespace holdfast {

class LayerAttempt;

class LayerHistory {
 public:
  // Measures `attempts` after each incident.
  explicit LayerHistory(std::uint64_t attempts) : attempts_(attempts) {}

  void incident() { left_ = attempts_; }
  // The next attempt; whether it is measured.
  void begin(std::uint64_t epoch, std::uint64_t attempt);
  bool measures() const { return measures_; }

  // Of one micro-batch. Those of an attempt are put together.
  void add(Stage stage, EvidenceRecorder::Kind kind, std::string_view tensor, DType dtype, const Probe& probe,
           bool scaled);

  // It is over: whether it was measured, and what.
  bool end(LayerAttempt* to);

  // The last few attempts that were measured, the running one included, oldest first.
  void put(EvidencePart* part) const;

 private:
  struct Layer {
    Stage stage;
    EvidenceRecorder::Kind kind;
    std::string tensor;
    DType dtype;
    Probe probe;
    bool scaled;
  };
  struct Attempt {
    std::uint64_t epoch = 0;
    std::uint64_t attempt = 0;
    std::vector<Layer> layers;
    std::size_t next =
        0;  // where the layer after the last is, if the order is that of the micro-batch before
  };
  static void describe(const Attempt& attempt, LayerAttempt* to);
  Layer* find(Stage stage, std::string_view tensor);

  const std::uint64_t attempts_;
  std::uint64_t left_ = 0;
  bool measures_ = false;
  std::deque<Attempt> last_;  // the running one at its end, if it is measured
};

}  // namespace holdfast
