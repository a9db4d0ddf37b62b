#include "snapshot.h"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>

#include "holdfast/coord/printable.h"

namespace holdfast {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kCacheLine = 64;

constexpr std::size_t rounded(std::size_t bytes, std::size_t to) { return (bytes + to - 1) / to * to; }

}  // namespace

void Snapshot::Free::operator()(std::byte* memory) const { std::free(memory); }

Snapshot::Snapshot(const TrainingState& state, bool with_replicated)
    : state_(state), with_replicated_(with_replicated) {
  const auto note = [&](Held held) {
    if (is_mine(held)) (held == Held::kReplicated ? has_replicated_ : has_own_) = true;
  };
  for (const StateTensor& tensor : state.tensors()) note(tensor.held);
  for (const StateBytes& bytes : state.bytes()) note(bytes.held);
}

Status Snapshot::take() {
  replicated_.clear();
  own_.clear();
  try {
    if (!memory_) allocate();
    copy_tensors();
    return copy_bytes();
  } catch (const std::bad_alloc&) {
    return Status::internal("no memory for a copy of the state");
  }
}

std::size_t Snapshot::tensor_bytes() const {
  std::size_t bytes = 0;
  for (const StateTensor& tensor : state_.tensors()) {
    if (is_mine(tensor.held)) bytes += rounded(static_cast<std::size_t>(tensor.bytes()), kCacheLine);
  }
  return bytes;
}

std::uint64_t Snapshot::bytes() const {
  std::uint64_t bytes = tensor_bytes();
  for (const Bytes& saved : saved_) bytes += saved.size();
  return bytes;
}

void Snapshot::allocate() {
  std::size_t bytes = tensor_bytes();
  bytes = rounded(bytes, kHugePage) + kHugePage;  // never nothing
  memory_.reset(static_cast<std::byte*>(std::aligned_alloc(kHugePage, bytes)));
  if (!memory_) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
  madvise(memory_.get(), bytes, MADV_HUGEPAGE);  // fewer faults at the first copy; as well without
#endif
}

void Snapshot::copy_tensors() {
  std::byte* to = memory_.get();
  for (const StateTensor& tensor : state_.tensors()) {
    if (!is_mine(tensor.held)) continue;
    const auto bytes = static_cast<std::size_t>(tensor.bytes());
    if (bytes > 0) std::memcpy(to, tensor.data, bytes);
    part_of(tensor.held).push_back(PartTensor::of(tensor, to));
    to += rounded(bytes, kCacheLine);
  }
}

Status Snapshot::copy_bytes() {
  saved_.clear();
  saved_.reserve(state_.bytes().size());  // the parts point into it
  for (const StateBytes& bytes : state_.bytes()) {
    if (!is_mine(bytes.held)) continue;
    const auto failed = [&](const std::string& why) {
      return Status::internal("saving " + printable(bytes.name) + " failed: " + why);
    };
    try {
      saved_.push_back(bytes.save());
    } catch (const std::exception& e) {
      return failed(printable(e.what()));
    } catch (...) {
      return failed("an exception of an unknown type");
    }
    part_of(bytes.held).push_back(PartTensor::of_bytes(bytes.name, saved_.back(), bytes.renewable));
  }
  return Status();
}

}  // namespace holdfast
