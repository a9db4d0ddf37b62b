#include "holdfast/training_state.h"

#include <algorithm>
#include <optional>

#include "checkpoint/state_limits.h"
#include "holdfast/coord/printable.h"

namespace holdfast {
namespace {

// Elements; none when there is a negative extent or the bytes overflow.
std::optional<std::int64_t> count(const StateTensor& tensor) {
  std::int64_t bytes = dtype_size(tensor.dtype);
  for (const std::int64_t extent : tensor.shape) {
    if (extent < 0 || __builtin_mul_overflow(bytes, extent, &bytes)) return std::nullopt;
  }
  return bytes / std::max<std::int64_t>(dtype_size(tensor.dtype), 1);
}

// Why this cannot be part of a state; "" when it can.
std::string fault_of_name(const std::string& name) {
  if (name.empty()) return "a name is empty";
  if (name.size() > kLongestStateName) return "a name is longer than 4096 bytes";
  if (!is_utf8(name) || printable(name) != name) return "\"" + printable(name) + "\" is no printable UTF-8";
  if (name == kReservedStateName) return "the name \"" + name + "\" belongs to the format of the files";
  return "";
}

std::string fault_of_shard(const StateTensor& tensor, std::int64_t elements) {
  std::int64_t bytes = 0;
  const bool inside = tensor.shard_offset >= 0 && tensor.shard_offset <= tensor.shard_total &&
                      elements <= tensor.shard_total - tensor.shard_offset;
  if (!inside) return "is a shard outside of its array";
  if (__builtin_mul_overflow(tensor.shard_total, dtype_size(tensor.dtype), &bytes))
    return "has a size that overflows";
  return "";
}

std::string fault_of(const StateTensor& tensor) {
  if (std::string fault = fault_of_name(tensor.name); !fault.empty()) return fault;
  const std::string name = "\"" + tensor.name + "\" ";
  if (!is_known(tensor.dtype)) return name + "has an unknown dtype";
  if (tensor.shape.size() > kMostStateDimensions) return name + "has too many dimensions";
  const std::optional<std::int64_t> elements = count(tensor);
  if (!elements) return name + "has a size that is negative or overflows";
  if (*elements > 0 && tensor.data == nullptr) return name + "has no memory";
  const std::string fault = tensor.held == Held::kSharded ? fault_of_shard(tensor, *elements) : "";
  return fault.empty() ? "" : name + fault;
}

std::string fault_of(const StateBytes& bytes) {
  if (std::string fault = fault_of_name(bytes.name); !fault.empty()) return fault;
  if (bytes.held == Held::kSharded) return "\"" + bytes.name + "\" is sharded, and only tensors can be";
  if (!bytes.save || !bytes.load) return "\"" + bytes.name + "\" lacks its save or load";
  return "";
}

Status refused(const std::string& fault) {
  return Status::usage("the training state cannot be used: " + fault);
}

}  // namespace

std::int64_t StateTensor::elements() const {
  std::int64_t elements = 1;
  for (const std::int64_t extent : shape) elements *= extent;
  return elements;
}

std::int64_t StateTensor::bytes() const { return elements() * dtype_size(dtype); }

TensorView StateTensor::view() const { return TensorView::contiguous(data, dtype, elements()); }

Status TrainingState::check() const {
  std::vector<std::string_view> names;
  for (const StateTensor& tensor : tensors_) {
    if (const std::string fault = fault_of(tensor); !fault.empty()) return refused(fault);
    names.push_back(tensor.name);
  }
  for (const StateBytes& bytes : bytes_) {
    if (const std::string fault = fault_of(bytes); !fault.empty()) return refused(fault);
    names.push_back(bytes.name);
  }
  std::ranges::sort(names);
  const auto twice = std::ranges::adjacent_find(names);
  return twice == names.end() ? Status() : refused("\"" + std::string(*twice) + "\" is there twice");
}

}  // namespace holdfast
