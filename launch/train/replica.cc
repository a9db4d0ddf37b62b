#include "train/replica.h"

#include <fmt/format.h>

#include <cstring>

#include "train/digest.h"

namespace holdfast::train {

Replica::Replica(const Options& options, Workload& workload, MPI_Comm communicator)
    : options_(options),
      workload_(workload),
      communicator_(communicator),
      optimizer_(make_optimizer(options.optimizer, workload.parameters().size())) {
  const std::span<float> parameters = workload.parameters();
  MPI_Bcast(parameters.data(), static_cast<int>(parameters.size()), MPI_FLOAT, 0, communicator);
  ema_.assign(parameters.begin(), parameters.end());
}

void Replica::update(const UpdateScale& scale) {
  optimizer_->next_step();
  const std::span<float> parameters = workload_.parameters();
  for (const BucketSlice& slice : workload_.layout()) {
    optimizer_->apply(static_cast<std::size_t>(slice.offset), static_cast<std::size_t>(slice.count),
                      parameters, workload_.gradients(), scale);
  }
  for (std::size_t i = 0; i < ema_.size(); ++i) {
    ema_[i] = options_.ema_decay * ema_[i] + (1.0f - options_.ema_decay) * parameters[i];
  }
}

TrainingState Replica::training_state() {
  TrainingState state;
  const auto add = [&](const BucketSlice& slice, std::string_view part, std::span<float> array) {
    StateTensor tensor;
    tensor.name = std::string(slice.tensor);
    if (!part.empty()) tensor.name.append("/").append(part);
    tensor.data = array.data() + slice.offset;
    tensor.shape = {slice.count};
    tensor.is_optimizer_state = !part.empty();
    state.add(std::move(tensor));
  };
  for (const BucketSlice& slice : workload_.layout()) {
    add(slice, "", workload_.parameters());
    for (const StateArray& array : optimizer_->state()) add(slice, array.name, array.values);
    add(slice, "ema", ema_);
  }
  for (const MutableBuffer& buffer : workload_.buffers()) {
    StateTensor tensor;
    tensor.name = buffer.name;
    tensor.data = buffer.data;
    tensor.dtype = buffer.is_fp32 ? DType::kFloat32 : DType::kUInt8;
    tensor.shape = {static_cast<std::int64_t>(buffer.bytes) / dtype_size(tensor.dtype)};
    tensor.forward_mutates = true;
    state.add(std::move(tensor));
  }
  const auto save_steps = [this] {
    const std::uint64_t steps = optimizer_->steps();
    return Bytes(reinterpret_cast<const char*>(&steps), sizeof steps);
  };
  const auto load_steps = [this](const Bytes& bytes) {
    std::uint64_t steps = 0;
    if (bytes.size() != sizeof steps) return Status::internal("the optimizer's step counter is damaged");
    std::memcpy(&steps, bytes.data(), sizeof steps);
    optimizer_->set_steps(steps);
    return Status();
  };
  state.add(StateBytes{"optimizer/steps", save_steps, load_steps});
  // Set anew for each micro-batch, so another number of ranks does without.
  StateBytes generator{"generator", [this] { return workload_.rng_state(); },
                       [this](const Bytes& bytes) { return workload_.set_rng_state(bytes); }, Held::kPerRank};
  generator.renewable = true;
  state.add(std::move(generator));
  return state;
}

void Replica::share_buffers() {
  std::vector<char> packed = packed_buffers();
  if (packed.empty()) return;
  MPI_Bcast(packed.data(), static_cast<int>(packed.size()), MPI_BYTE, 0, communicator_);
  unpack_buffers(packed);
}

std::vector<char> Replica::packed_buffers() const {
  std::vector<char> packed;
  for (const MutableBuffer& buffer : workload_.buffers()) {
    const char* data = static_cast<const char*>(buffer.data);
    packed.insert(packed.end(), data, data + buffer.bytes);
  }
  return packed;
}

void Replica::unpack_buffers(const std::vector<char>& packed) {
  const char* from = packed.data();
  for (const MutableBuffer& buffer : workload_.buffers()) {
    std::memcpy(buffer.data, from, buffer.bytes);
    from += buffer.bytes;
  }
}

std::string Replica::digests() {
  Digest parameters;
  parameters.add(workload_.parameters());
  Digest optimizer;
  for (const StateArray& array : optimizer_->state()) optimizer.add(array.values);
  const std::uint64_t steps = optimizer_->steps();
  optimizer.add(&steps, sizeof(steps));
  Digest ema;
  ema.add(ema_);
  Digest buffers;
  const std::vector<char> packed = packed_buffers();
  buffers.add(packed.data(), packed.size());
  Digest rng;
  const std::string rng_state = workload_.rng_state();
  rng.add(rng_state.data(), rng_state.size());
  return fmt::format("parameters={} optimizer={} ema={} buffers={} rng={}", parameters.hex(), optimizer.hex(),
                     ema.hex(), buffers.hex(), rng.hex());
}

}  // namespace holdfast::train
