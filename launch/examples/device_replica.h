// A rank of nccl_train.cu and nccl_minimal.cu: its GPU, and what an attempt does there.
//
// An attempt is enqueued on one stream from end to end: forward, backward, the scan of losses and gradients,
// their all-reduce, the scan of this rank's share of the sum; and by CudaAttempt the record, its all-reduce,
// the update. Nothing is read back in between. The host learns the verdict while the update runs, and before
// it counts it.
#pragma once

#include <nccl.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "examples/device_mlp.h"
#include "examples/image_task.h"
#include "holdfast/collectives/nccl_collective.h"
#include "holdfast/cuda_attempt.h"

namespace holdfast::example {

inline void must(const Status& status, const Where& where = Where::current()) {
  if (!status.ok()) leave(status.to_string().c_str(), status.exit_code(), where);
}
inline void must(ncclResult_t code, const Where& where = Where::current()) {
  if (code != ncclSuccess) leave(ncclGetLastError(nullptr), 84, where);
}

struct Ids {  // from rank 0
  Bytes gradients = Bytes(sizeof(ncclUniqueId), '\0');
  Bytes verdicts = Bytes(sizeof(ncclUniqueId), '\0');
};

class Replica {
 public:
  Replica(const Options& options, const Data& data, const Ids& ids, int rank, int size, int device)
      : options_(options),
        data_(data),
        rank_(rank),
        size_(size),
        sampler_(1, data.training.count, rank, size, options.batch, 1) {
    must(cudaSetDevice(device));
    must(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    ncclUniqueId id;
    std::memcpy(id.internal, ids.gradients.data(), sizeof(id.internal));
    must(ncclCommInitRank(&communicator_, size, id, rank));
    must(NcclCollective::create(ids.verdicts, rank, size, device, NcclOptions(), &collective_));

    const auto pixels = static_cast<int>(data.training.rows * data.training.cols);
    model_.emplace(MlpSizes{.pixels = pixels, .hidden = options.hidden, .batch = options.batch}, stream_);
    sums_.emplace(model_->parameters.size());
    initialize();
    must(cudaMallocHost(reinterpret_cast<void**>(&pixels_), model_->inputs.size() * sizeof(float)));
    must(cudaMallocHost(reinterpret_cast<void**>(&labels_), model_->labels.size() * sizeof(int)));

    guard_updates();
    must(cudaDeviceSynchronize());  // what was written so far was not written on our stream
    warm_up();
  }

  ~Replica() {
    static_cast<void>(cudaStreamSynchronize(stream_));
    attempt_.reset();
    collective_.reset();
    static_cast<void>(ncclCommDestroy(communicator_));
    static_cast<void>(cudaFreeHost(pixels_));
    static_cast<void>(cudaFreeHost(labels_));
    model_.reset();
    static_cast<void>(cudaStreamDestroy(stream_));
  }

  // ==== the attempt, on the stream, up to the gradients' sum. The rest is attempt()'s.
  void compute(std::uint64_t attempt) {
    sampler_.batch(attempt, 0, &samples_);
    upload(data_.training);
    model_->forward();
    model_->backward();
    if (attempt == options_.inject_at && rank_ == options_.inject_rank) {
      must(cudaMemsetAsync(model_->gradients.data() + 1, 0xff, sizeof(float), stream_));  // a NaN
    }
    attempt_->scan(loss_scan_);
    attempt_->scan(gradient_scan_);
    must(ncclAllReduce(model_->gradients.data(), sums_->data(), sums_->size(), ncclFloat, ncclSum,
                       communicator_, stream_));
    attempt_->scan(share_scan_);
    omitted_ = attempt == options_.omit_update;
  }

  // The host's part of an update that was applied: the schedule goes on.
  void count_update() { updates_ += omitted_ ? 0 : 1; }
  // ==== end of the attempt

  double loss() const { return mean(model_->losses); }

  double accuracy() {
    const std::int64_t batches = data_.test.count / options_.batch;
    double sum = 0;
    for (std::int64_t b = 0; b < batches; ++b) {
      samples_.clear();
      for (int i = 0; i < options_.batch; ++i) samples_.push_back(b * options_.batch + i);
      upload(data_.test);
      model_->forward();
      sum += mean(model_->correct);  // waits, so the next batch may be written
    }
    return sum / static_cast<double>(std::max<std::int64_t>(batches, 1));
  }

  std::string parameters_digest() const { return digest(model_->parameters.read(stream_)); }

  int rank() const { return rank_; }
  int size() const { return size_; }
  std::uint64_t updates() const { return updates_; }
  NcclCollective& collective() { return *collective_; }
  // Any thread: whoever waits in the gradients' sum returns. The guard aborts its own communicator by itself.
  void abort_gradients() { static_cast<void>(ncclCommAbort(communicator_)); }
  CudaAttempt& attempt() { return *attempt_; }

 private:
  // What is looked at, and the update that is left out when anybody finds something.
  void guard_updates() {
    must(CudaAttempt::create(*collective_, stream_, &attempt_));
    const auto floats = [](const float* data, std::int64_t count) {
      return TensorView::contiguous(data, DType::kFloat32, count);
    };
    const CudaTensor losses[] = {{"losses", floats(model_->losses.data(), options_.batch)}};
    must(attempt_->add_scan(Stage::kLoss, losses, &loss_scan_));

    std::vector<CudaTensor> gradients;
    for (const TensorView& view : model_->tensors(model_->gradients.data())) {
      gradients.push_back({DeviceMlp::kNames[gradients.size()], view});
    }
    must(attempt_->add_scan(Stage::kBackward, gradients, &gradient_scan_));

    const std::int64_t count = model_->sizes.parameters();
    const std::int64_t begin = count * rank_ / size_;
    const CudaTensor share[] = {
        {"sum of gradients", floats(sums_->data() + begin, count * (rank_ + 1) / size_ - begin), begin}};
    must(attempt_->add_scan(Stage::kReduction, share, &share_scan_));

    attempt_->set_update([this](const std::uint32_t* skip) {
      if (!omitted_) model_->update(sums_->data(), next_step(), skip);
      return Status();
    });
  }

  // The same on every rank: uniform, He.
  void initialize() {
    std::vector<float> values(model_->parameters.size(), 0.0f);
    std::mt19937 random(3);
    const auto fill = [&](float* to, int count, int inputs) {
      const float limit = std::sqrt(6.0f / static_cast<float>(inputs));
      for (int i = 0; i < count; ++i) to[i] = limit * (static_cast<float>(random()) / 2147483648.0f - 1);
    };
    const MlpSizes& sizes = model_->sizes;
    fill(values.data(), sizes.weights1(), sizes.pixels);
    fill(values.data() + sizes.weights1() + sizes.hidden, sizes.weights2(), sizes.hidden);
    must(cudaMemcpy(model_->parameters.data(), values.data(), values.size() * sizeof(float),
                    cudaMemcpyHostToDevice));
  }

  // Everything once, so that nothing is loaded or allocated later: with several GPUs in a process that may
  // wait for a collective that waits for us. Before the first sum the flag is up, so the update does nothing.
  void warm_up() {
    model_->forward();
    model_->backward();
    model_->update(sums_->data(), next_step(), collective_->device_skip_flag());
    must(cudaStreamSynchronize(stream_));
  }

  // Into pinned memory, which the stream has read by the time a verdict is there.
  void upload(const train::ImageDataset& images) {
    const auto pixels = static_cast<std::size_t>(model_->sizes.pixels);
    for (std::size_t i = 0; i < samples_.size(); ++i) {
      const auto sample = static_cast<std::size_t>(samples_[i]);
      labels_[i] = images.labels[sample];
      for (std::size_t p = 0; p < pixels; ++p) {
        pixels_[i * pixels + p] = static_cast<float>(images.pixels[sample * pixels + p]) / 255.0f - 0.3f;
      }
    }
    must(cudaMemcpyAsync(model_->inputs.data(), pixels_, model_->inputs.size() * sizeof(float),
                         cudaMemcpyHostToDevice, stream_));
    must(cudaMemcpyAsync(model_->labels.data(), labels_, model_->labels.size() * sizeof(int),
                         cudaMemcpyHostToDevice, stream_));
  }

  // A short warm-up, by updates and not by attempts: a skip does not move the schedule.
  AdamStep next_step() const {
    const double t = static_cast<double>(updates_) + 1;
    return {.rate = options_.rate * static_cast<float>(std::min(1.0, t / 50)),
            .mean_correction = static_cast<float>(1 / (1 - std::pow(0.9, t))),
            .square_correction = static_cast<float>(1 / (1 - std::pow(0.999, t))),
            .gradient_scale = 1.0f / static_cast<float>(size_)};
  }

  template <class T>
  double mean(const DeviceArray<T>& values) const {
    double sum = 0;
    for (const T value : values.read(stream_)) sum += static_cast<double>(value);
    return sum / static_cast<double>(values.size());
  }

  const Options& options_;
  const Data& data_;
  const int rank_;
  const int size_;
  train::Sampler sampler_;
  cudaStream_t stream_ = nullptr;
  ncclComm_t communicator_ = nullptr;
  std::unique_ptr<NcclCollective> collective_;
  std::optional<DeviceMlp> model_;
  std::optional<DeviceArray<float>> sums_;  // of the gradients, over all ranks
  std::unique_ptr<CudaAttempt> attempt_;
  std::size_t loss_scan_ = 0;
  std::size_t gradient_scan_ = 0;
  std::size_t share_scan_ = 0;
  std::vector<std::int64_t> samples_;
  float* pixels_ = nullptr;  // pinned
  int* labels_ = nullptr;    // pinned
  bool omitted_ = false;
  std::uint64_t updates_ = 0;
};

inline int gpus() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

// ---- what the programs say

inline void say_loss(const Replica& replica, const Options& options, std::uint64_t attempt) {
  if (replica.rank() != 0 || (attempt % 50 != 0 && attempt + 1 != options.steps)) return;
  std::printf("attempt %llu: loss %.4f\n", static_cast<unsigned long long>(attempt), replica.loss());
}

inline void say_result(Replica& replica) {
  std::printf("rank %d: %llu updates, parameters %s\n", replica.rank(),
              static_cast<unsigned long long>(replica.updates()), replica.parameters_digest().c_str());
  if (replica.rank() == 0) std::printf("accuracy %.4f\n", replica.accuracy());
  std::fflush(stdout);
}

}  // namespace holdfast::example
