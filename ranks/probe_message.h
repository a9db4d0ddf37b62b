// A measurement of a layer, as it is kept.
#pragma once

#include <string_view>

#include "holdfast/collectives/record.h"
#include "holdfast/evidence.h"
#include "holdfast/scan.h"

namespace holdfast {

class TensorProbe;

void put_probe(Stage stage, EvidenceRecorder::Kind kind, std::string_view tensor, DType dtype,
               const Probe& probe, int micro_batch, bool scaled, TensorProbe* to);

}  // namespace holdfast
