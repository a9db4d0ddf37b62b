// Image classification data sets in IDX files (MNIST, Fashion-MNIST), plain or gzip-compressed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "holdfast/collectives/status.h"

namespace holdfast::train {

struct ImageDataset {
  std::int64_t count = 0;            // records; at least 1 after a successful load
  std::int64_t rows = 0;             // pixels
  std::int64_t cols = 0;             // pixels
  std::vector<std::uint8_t> pixels;  // count x rows x cols, row-major, 0 to 255
  std::vector<std::uint8_t> labels;  // count, each below the class_count it was loaded with
};

// Loads {dir}/{split}-images-idx3-ubyte and {dir}/{split}-labels-idx1-ubyte, or the same names with ".gz"
// where the first is missing; `split` is "train" or "t10k". Whether a file is compressed is told by its
// content.
//
// Trusts nothing: memory grows with what was read, not with what a header announces. USAGE, with a message
// that names the file and, where there is one, the record (from 0), for: a missing or unreadable file, a
// wrong magic number, no records, sides of 0 or above 4096 pixels, more than 4 GiB, data that is cut short or
// goes on after the last record, gzip damage, images and labels that differ in number, a label that is not
// below `class_count`, and an image whose pixels are all 0 (an empty record). `*out` is written on success
// only. Does not throw. Local; every rank loads its own copy.
Status load_idx(const std::string& dir, const std::string& split, int class_count, ImageDataset* out);

}  // namespace holdfast::train
