#include "scan_plan.h"

#include <string>

namespace holdfast::cuda {
namespace {

bool is_complex(DType dtype) { return dtype == DType::kComplex64 || dtype == DType::kComplex128; }

std::int64_t divide_up(std::int64_t a, std::int64_t b) { return a / b + (a % b != 0 ? 1 : 0); }

// Empty when the tensor can be scanned.
std::string refusal(const TensorView& tensor) {
  if (!is_known(tensor.dtype)) return "its dtype is not known";
  if (!tensor.strides.empty()) return "it has strides; the scan on a GPU takes contiguous tensors only";
  if (tensor.element_count < 0) return "its number of elements is negative";
  if (tensor.element_count > kMostTiles * kTileBytes / dtype_size(tensor.dtype)) return "it is too large";
  if (tensor.data == nullptr && tensor.element_count > 0) return "its address is null";
  const std::int64_t part = dtype_size(tensor.dtype) / (is_complex(tensor.dtype) ? 2 : 1);
  if (reinterpret_cast<std::uintptr_t>(tensor.data) % static_cast<std::uintptr_t>(part) != 0) {
    return "its address is not a multiple of " + std::to_string(part);
  }
  return "";
}

PlannedTensor cut(const TensorView& tensor) {
  PlannedTensor planned;
  planned.data = tensor.data;
  planned.dtype = tensor.dtype;
  planned.aligned = reinterpret_cast<std::uintptr_t>(tensor.data) % kPackBytes == 0 ? 1 : 0;
  if (is_always_finite(tensor.dtype)) return planned;
  const std::int64_t parts_each = is_complex(tensor.dtype) ? 2 : 1;
  const std::int64_t width = dtype_size(tensor.dtype) / parts_each;
  const std::int64_t chunk = std::int64_t{width == 8 ? kLanes64 : kLanes} * kRows * kBlocksPerChunk;
  planned.parts = tensor.element_count * parts_each;
  planned.chunks = divide_up(planned.parts, chunk);
  planned.tiles = static_cast<std::uint32_t>(divide_up(planned.parts, kTileBytes / width));
  return planned;
}

}  // namespace

Status plan_scan(std::span<const TensorView> tensors, ScanPlan* plan) {
  *plan = {};
  std::int64_t tiles = 0;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (const std::string why = refusal(tensors[i]); !why.empty()) {
      return Status::usage("tensor " + std::to_string(i) + " cannot be scanned: " + why);
    }
    PlannedTensor planned = cut(tensors[i]);
    planned.first_chunk = plan->chunks;
    planned.first_tile = static_cast<std::uint32_t>(tiles);
    plan->chunks += planned.chunks;
    tiles += planned.tiles;
    if (tiles > kMostTiles) return Status::usage("the tensors hold more than 2^48 bytes in all");
    if (planned.tiles > 0) ++plan->scanned;
    plan->tensors.push_back(planned);
    plan->results.emplace_back().count = static_cast<std::uint64_t>(tensors[i].element_count);
  }
  plan->tile_tensor.reserve(static_cast<std::size_t>(tiles));
  for (std::size_t i = 0; i < plan->tensors.size(); ++i) {
    plan->tile_tensor.insert(plan->tile_tensor.end(), plan->tensors[i].tiles, static_cast<std::uint32_t>(i));
  }
  return Status::ok_status();
}

}  // namespace holdfast::cuda
