// The state of one rank of a pretended trainer: memory of its own, and values that are known from a seed.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "holdfast/training_state.h"

namespace holdfast {

inline const std::vector<DType> kAllDTypes = {
    DType::kFloat64,    DType::kFloat32,   DType::kFloat16,    DType::kBFloat16, DType::kFloat8E4M3FN,
    DType::kFloat8E5M2, DType::kComplex64, DType::kComplex128, DType::kBool,     DType::kUInt8,
    DType::kInt8,       DType::kInt16,     DType::kInt32,      DType::kInt64};

// Elements [first, first + count) of an endless array of finite values.
inline Bytes finite_values(const std::string& name, DType dtype, std::uint64_t seed, std::int64_t first,
                           std::int64_t count) {
  const auto width = static_cast<std::size_t>(dtype_size(dtype));
  const bool complex = dtype == DType::kComplex64 || dtype == DType::kComplex128;
  const std::size_t part = complex ? width / 2 : width;
  const auto mix = [](std::uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
  };
  const std::uint64_t key = mix(std::hash<std::string>()(name) + mix(seed + 1));
  Bytes values(static_cast<std::size_t>(count) * width, '\0');
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::uint64_t at = static_cast<std::uint64_t>(first) * width + i;
    auto byte = static_cast<unsigned>(mix(key + at) & 0xffu);
    if (dtype == DType::kBool) byte &= 1u;
    // Without its highest bit an exponent is not all ones.
    if (!is_always_finite(dtype) && i % part == part - 1) byte &= ~0x40u;
    values[i] = static_cast<char>(byte);
  }
  return values;
}

class RankState {
 public:
  RankState(int rank, int ranks) : rank_(rank), ranks_(ranks) {}
  RankState(const RankState&) = delete;
  RankState& operator=(const RankState&) = delete;

  void add(const std::string& name, DType dtype, std::vector<std::int64_t> shape, Held held) {
    StateTensor tensor;
    tensor.name = name;
    tensor.dtype = dtype;
    tensor.shape = std::move(shape);
    tensor.held = held;
    add_tensor(tensor);
  }
  // The rank's even part of an array.
  void add_sharded(const std::string& name, DType dtype, std::int64_t total) {
    add_shard(name, dtype, total * rank_ / ranks_, total * (rank_ + 1) / ranks_, total);
  }
  void add_shard(const std::string& name, DType dtype, std::int64_t begin, std::int64_t end,
                 std::int64_t total) {
    StateTensor tensor;
    tensor.name = name;
    tensor.dtype = dtype;
    tensor.shape = {end - begin};
    tensor.held = Held::kSharded;
    tensor.shard_offset = begin;
    tensor.shard_total = total;
    add_tensor(tensor);
  }
  void add_tensor(StateTensor tensor) {
    Bytes& memory = memory_[tensor.name];
    memory.resize(static_cast<std::size_t>(tensor.bytes()) + 1);  // never nothing
    tensor.data = memory.data();
    tensors_.push_back(tensor);
    state_.add(std::move(tensor));
  }
  void add_bytes(const std::string& name, Held held) {
    memory_[name];
    bytes_[name] = held;
    StateBytes bytes;
    bytes.name = name;
    bytes.held = held;
    bytes.save = [this, name] { return memory_.at(name); };
    bytes.load = [this, name](const Bytes& saved) {
      memory_.at(name) = saved;
      return Status();
    };
    state_.add(std::move(bytes));
  }
  // One of everything.
  void add_all_kinds() {
    for (const DType dtype : kAllDTypes) {
      const std::string type(dtype_name(dtype));
      add("model/" + type, dtype, {3, 5}, Held::kReplicated);
      add("own/" + type, dtype, {2, 2}, Held::kPerRank);
      add_sharded("sharded/" + type, dtype, 37);
    }
    add("scalar", DType::kFloat32, {}, Held::kReplicated);
    add("empty", DType::kFloat32, {0, 4}, Held::kReplicated);
    add_bytes("schedule", Held::kReplicated);
    add_bytes("rng", Held::kPerRank);
  }

  std::map<std::string, Bytes> expected(std::uint64_t seed) const {
    std::map<std::string, Bytes> values;
    for (const StateTensor& tensor : tensors_) {
      values[tensor.name] =
          finite_values(tensor.name, tensor.dtype, seed_for(tensor.held, seed),
                        tensor.held == Held::kSharded ? tensor.shard_offset : 0, tensor.elements());
    }
    for (const auto& [name, held] : bytes_) {
      values[name] =
          finite_values(name, DType::kUInt8, seed_for(held, seed), 0, static_cast<std::int64_t>(seed % 50));
    }
    return values;
  }
  void fill(std::uint64_t seed) {
    for (const auto& [name, value] : expected(seed)) put(name, value);
  }
  // Like fill(), and different from whatever a fill() gives.
  void scribble() {
    for (const StateTensor& tensor : tensors_)
      std::memset(tensor.data, 0x2a, static_cast<std::size_t>(tensor.bytes()));
    for (const auto& [name, held] : bytes_) memory_.at(name) = "scribbled";
  }
  std::map<std::string, Bytes> values() const {
    std::map<std::string, Bytes> values;
    for (const StateTensor& tensor : tensors_) {
      values[tensor.name] = memory_.at(tensor.name).substr(0, static_cast<std::size_t>(tensor.bytes()));
    }
    for (const auto& [name, held] : bytes_) values[name] = memory_.at(name);
    return values;
  }

  // For tensors of fp32.
  void set(const std::string& name, std::size_t index, float value) {
    std::memcpy(memory_.at(name).data() + index * sizeof value, &value, sizeof value);
  }

  TrainingState& state() { return state_; }
  int rank() const { return rank_; }

 private:
  std::uint64_t seed_for(Held held, std::uint64_t seed) const {
    return held == Held::kPerRank ? seed * 1000 + static_cast<std::uint64_t>(rank_) : seed * 1000 + 999;
  }
  void put(const std::string& name, const Bytes& value) {
    if (bytes_.contains(name)) {
      memory_.at(name) = value;
    } else {
      std::memcpy(memory_.at(name).data(), value.data(), value.size());
    }
  }

  const int rank_;
  const int ranks_;
  std::map<std::string, Bytes> memory_;  // of tensors: stays where it is
  std::vector<StateTensor> tensors_;
  std::map<std::string, Held> bytes_;
  TrainingState state_;
};

}  // namespace holdfast
