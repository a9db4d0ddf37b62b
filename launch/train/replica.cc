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

std::string Replica::digests() const {
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
