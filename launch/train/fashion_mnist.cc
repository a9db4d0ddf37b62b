#include "train/fashion_mnist.h"

#include <dlfcn.h>
#include <torch/torch.h>

#include <cstring>

#include "train/idx_dataset.h"

namespace holdfast::train {
namespace {

constexpr int kClasses = 10;
constexpr std::int64_t kAlignment = 16;  // tensors begin at 64-byte boundaries of the flat arrays
// Mean and deviation of the training pixels, scaled to 0..1.
constexpr float kPixelMean = 0.2860f;
constexpr float kPixelDeviation = 0.3530f;

struct Net : torch::nn::Module {
  Net()
      : conv1(register_module("conv1", conv(1, 16))),
        norm1(register_module("norm1", torch::nn::BatchNorm2d(16))),
        conv2(register_module("conv2", conv(16, 32))),
        norm2(register_module("norm2", torch::nn::BatchNorm2d(32))),
        dropout(register_module("dropout", torch::nn::Dropout(0.1))),
        classifier(register_module("classifier", torch::nn::Linear(32 * 7 * 7, kClasses))) {}

  static torch::nn::Conv2d conv(int in, int out) {
    return torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, 3).stride(2).padding(1).bias(false));
  }

  torch::Tensor forward(torch::Tensor x) {
    x = torch::relu(norm1(conv1(x)));
    x = torch::relu(norm2(conv2(x)));
    return classifier(dropout(x.flatten(1)));
  }

  torch::nn::Conv2d conv1;
  torch::nn::BatchNorm2d norm1;
  torch::nn::Conv2d conv2;
  torch::nn::BatchNorm2d norm2;
  torch::nn::Dropout dropout;
  torch::nn::Linear classifier;
};

// One core a rank: ranks are the parallelism. The BLAS behind libtorch has a thread pool of its own, which
// at::set_num_threads does not reach.
void use_one_thread() {
  at::set_num_threads(1);
  if (void* set = dlsym(RTLD_DEFAULT, "openblas_set_num_threads")) reinterpret_cast<void (*)(int)>(set)(1);
}

std::span<float> floats(torch::Tensor& tensor) {
  return {tensor.data_ptr<float>(), static_cast<std::size_t>(tensor.numel())};
}

class FashionMnist final : public Workload {
 public:
  FashionMnist(ImageDataset train, ImageDataset test, std::uint64_t seed)
      : train_(std::move(train)), test_(std::move(test)) {
    use_one_thread();
    torch::manual_seed(seed);
    net_ = std::make_unique<Net>();
    flatten_parameters();
    for (auto& buffer : net_->named_buffers()) {
      torch::Tensor& tensor = buffer.value();
      buffers_.push_back({buffer.key(), tensor.data_ptr(), tensor.nbytes()});
    }
  }

  std::span<float> parameters() override { return floats(parameters_); }
  std::span<float> gradients() override { return floats(gradients_); }
  std::span<const BucketSlice> layout() const override { return layout_; }
  std::span<const MutableBuffer> buffers() const override { return buffers_; }
  std::int64_t training_samples() const override { return train_.count; }
  std::int64_t test_samples() const override { return test_.count; }
  std::int64_t input_elements(std::int64_t batch) const override { return batch * train_.rows * train_.cols; }
  std::int64_t output_elements(std::int64_t batch) const override { return batch * kClasses; }

  void load(std::span<const std::int64_t> sample_ids, std::uint64_t rng_key) override {
    torch::manual_seed(rng_key);
    input_ = pixels(train_, sample_ids);
    target_ = labels(train_, sample_ids);
  }

  std::span<float> input() override { return floats(input_); }

  void forward() override {
    net_->train();
    output_ = net_->forward(input_);
  }

  std::span<float> output() override { return floats(output_); }

  std::int64_t targets(std::span<const std::int64_t> sample_ids) const override {
    return static_cast<std::int64_t>(sample_ids.size());
  }
  bool variable_targets() const override { return false; }

  void compute_loss(double denominator) override {
    loss_ = torch::nn::functional::cross_entropy(output_, target_, sum_of_losses()) / denominator;
  }
  std::span<float, 1> loss() override { return std::span<float, 1>(loss_.data_ptr<float>(), 1); }

  void backward(float scale) override { loss_.backward(torch::full({}, scale)); }

  Score evaluate(std::int64_t begin, std::int64_t end) override {
    constexpr std::int64_t kBatch = 250;
    torch::NoGradGuard no_grad;
    net_->eval();
    Score score;
    for (std::int64_t from = begin; from < end; from += kBatch) {
      std::vector<std::int64_t> ids;
      for (std::int64_t id = from; id < std::min(from + kBatch, end); ++id) ids.push_back(id);
      const torch::Tensor answers = net_->forward(pixels(test_, ids));
      const torch::Tensor right = labels(test_, ids);
      score.loss_sum += torch::nn::functional::cross_entropy(answers, right, sum_of_losses()).item<double>();
      score.correct += answers.argmax(1).eq(right).sum().item<std::int64_t>();
      score.total += static_cast<std::int64_t>(ids.size());
    }
    return score;
  }

  std::string rng_state() const override {
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    const torch::Tensor state = generator.get_state();
    return {static_cast<const char*>(state.data_ptr()), state.nbytes()};
  }

 private:
  // Moves every parameter into one flat array and gives it a gradient in another, so that optimizer,
  // reduction and scan work on whole arrays.
  void flatten_parameters() {
    std::int64_t total = 0;
    for (const auto& parameter : net_->named_parameters()) {
      names_.push_back(parameter.key());
      layout_.push_back({{}, total, parameter.value().numel()});
      total += (parameter.value().numel() + kAlignment - 1) / kAlignment * kAlignment;
    }
    parameters_ = torch::zeros({total});
    gradients_ = torch::zeros({total});
    std::size_t i = 0;
    for (auto& parameter : net_->named_parameters()) {
      torch::Tensor& tensor = parameter.value();
      BucketSlice& slice = layout_[i];
      slice.tensor = names_[i++];
      const auto home = [&](torch::Tensor& flat) {
        return flat.narrow(0, slice.offset, slice.count).view(tensor.sizes());
      };
      torch::Tensor values = home(parameters_);
      values.copy_(tensor.detach());
      tensor.set_data(values);
      tensor.mutable_grad() = home(gradients_);
    }
  }

  static torch::nn::functional::CrossEntropyFuncOptions sum_of_losses() {
    return torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum);
  }

  static torch::Tensor pixels(const ImageDataset& set, std::span<const std::int64_t> ids) {
    const std::int64_t size = set.rows * set.cols;
    torch::Tensor batch = torch::empty({static_cast<std::int64_t>(ids.size()), 1, set.rows, set.cols});
    float* to = batch.data_ptr<float>();
    for (const std::int64_t id : ids) {
      const std::uint8_t* from = set.pixels.data() + id * size;
      for (std::int64_t p = 0; p < size; ++p) {
        *to++ = (static_cast<float>(from[p]) / 255.0f - kPixelMean) / kPixelDeviation;
      }
    }
    return batch;
  }

  static torch::Tensor labels(const ImageDataset& set, std::span<const std::int64_t> ids) {
    torch::Tensor batch = torch::empty({static_cast<std::int64_t>(ids.size())}, torch::kInt64);
    std::int64_t* to = batch.data_ptr<std::int64_t>();
    for (const std::int64_t id : ids) *to++ = set.labels[static_cast<std::size_t>(id)];
    return batch;
  }

  const ImageDataset train_;
  const ImageDataset test_;
  std::unique_ptr<Net> net_;
  std::vector<std::string> names_;  // behind layout_
  std::vector<BucketSlice> layout_;
  std::vector<MutableBuffer> buffers_;
  torch::Tensor parameters_;
  torch::Tensor gradients_;
  torch::Tensor input_;
  torch::Tensor target_;
  torch::Tensor output_;
  torch::Tensor loss_;
};

}  // namespace

Status make_fashion_mnist(const std::string& data_dir, std::uint64_t seed, std::unique_ptr<Workload>* out) {
  ImageDataset train;
  ImageDataset test;
  if (Status s = load_idx(data_dir, "train", kClasses, &train); !s.ok()) return s;
  if (Status s = load_idx(data_dir, "t10k", kClasses, &test); !s.ok()) return s;
  if (train.rows != 28 || train.cols != 28 || test.rows != 28 || test.cols != 28) {
    return Status::usage(data_dir + ": images are not 28 x 28 pixels");
  }
  *out = std::make_unique<FashionMnist>(std::move(train), std::move(test), seed);
  return Status();
}

}  // namespace holdfast::train
