// A small byte-level transformer (decoder only) on text files.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "holdfast/collectives/status.h"
#include "train/workload.h"

namespace holdfast::train {

struct GptOptions {
  std::int64_t context = 64;  // bytes that a prediction sees at most; a sample is a window of so many
  std::int64_t width = 64;    // of the residual stream; a multiple of `heads`
  std::int64_t layers = 2;
  std::int64_t heads = 4;
  double dropout = 0.1;
};

// Reads the text (see load_text) and makes the network, the same on every rank with the same `seed`. A target
// is a byte to predict. The stage `input` is the embedded text (token plus position), batch x context x
// width, because integers have no room for a fault; it is computed in load(), with its gradient. `output` are
// the logits, batch x context x 256, those behind a short window's end included. USAGE for bad text, and
// options that make no network. Single-threaded.
Status make_gpt(const std::vector<std::string>& paths, std::uint64_t seed, const GptOptions& options,
                std::unique_ptr<Workload>* out);

}  // namespace holdfast::train
