// A small convolutional network with BatchNorm and dropout on Fashion-MNIST.
#pragma once

#include <memory>
#include <string>

#include "holdfast/collectives/status.h"
#include "train/workload.h"

namespace holdfast::train {

// Reads the data set from `data_dir` (see load_idx) and makes the network, the same on every rank with the
// same `seed`. USAGE, naming file and record, for data that is missing or damaged. Single-threaded.
Status make_fashion_mnist(const std::string& data_dir, std::uint64_t seed, std::unique_ptr<Workload>* out);

}  // namespace holdfast::train
