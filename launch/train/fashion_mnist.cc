#include "train/fashion_mnist.h"

#include <algorithm>

#include "train/idx_dataset.h"
#include "train/text_dataset.h"
#include "train/torch_support.h"

namespace holdfast::train {
namespace {

constexpr int kClasses = 10;
constexpr std::int64_t kSide = 28;  // pixels
// Mean and deviation of the training pixels, scaled to 0..1.
constexpr float kPixelMean = 0.2860f;
constexpr float kPixelDeviation = 0.3530f;
constexpr float kPixelScale = 255.0f;

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

  torch::Tensor forward(torch::Tensor x, const NaturalFaults& faults, LayerTap* tap = nullptr) {
    // norm1 and conv2 are linear in their weights, so this is what overgrown ones would make.
    const float growth = faults.on(NaturalFault::kActivationOverflow) ? kOvergrowth : 1.0f;
    x = tapped(conv1(x), "conv1", tap);
    x = torch::relu(tapped(norm1(x), "norm1", tap));
    if (growth != 1.0f) x = x * growth;
    x = tapped(conv2(x), "conv2", tap);
    if (growth != 1.0f) x = x * growth;
    x = dropout(torch::relu(tapped(norm2(x), "norm2", tap)).flatten(1));
    // Dropped or not, the slope of the root at 0 meets the gradient: 0 x Inf. ReLU would hide that again, but
    // not where it was dropout that made the 0.
    if (faults.on(NaturalFault::kDroppedSquareRoot)) x = torch::where(x > 0, torch::sqrt(x), 0.0f);
    x = tapped(x, "features", tap);
    return tapped(classifier(x), "classifier", tap);
  }

  // A unit of norm2 that ReLU always closes: neither it nor its weights on either side get a gradient.
  void make_dead_unit() {
    torch::NoGradGuard no_grad;
    norm2->weight[0] = 0.0f;
    norm2->bias[0] = -1.0f;
  }

  torch::nn::Conv2d conv1;
  torch::nn::BatchNorm2d norm1;
  torch::nn::Conv2d conv2;
  torch::nn::BatchNorm2d norm2;
  torch::nn::Dropout dropout;
  torch::nn::Linear classifier;
};

class FashionMnist final : public Workload {
 public:
  FashionMnist(ImageDataset train, ImageDataset test, std::uint64_t seed)
      : train_(std::move(train)), test_(std::move(test)), net_(make_net(seed)), flat_(*net_) {
    for (auto& buffer : net_->named_buffers()) {
      torch::Tensor& tensor = buffer.value();
      buffers_.push_back(
          {buffer.key(), tensor.data_ptr(), tensor.nbytes(), tensor.scalar_type() == torch::kFloat32});
    }
  }

  std::span<float> parameters() override { return flat_.parameters(); }
  std::span<float> gradients() override { return flat_.gradients(); }
  std::span<const BucketSlice> layout() const override { return flat_.layout(); }
  std::span<const MutableBuffer> buffers() const override { return buffers_; }
  std::int64_t training_samples() const override { return train_.count; }
  int classes() const override { return kClasses; }
  std::int64_t label(std::int64_t sample_id) const override {
    return train_.labels[static_cast<std::size_t>(sample_id)];
  }
  std::int64_t test_samples() const override { return test_.count; }
  std::int64_t input_elements(std::int64_t batch) const override { return batch * kSide * kSide; }
  std::int64_t output_elements(std::int64_t batch) const override { return batch * kClasses; }

  void load(std::span<const std::int64_t> sample_ids, std::uint64_t rng_key) override {
    torch::manual_seed(rng_key);
    input_ = pixels(train_, sample_ids, faults_.on(NaturalFault::kCorruptRecord));
    target_ = labels(train_, sample_ids);
    if (faults_.on(NaturalFault::kEmptyTargetMask)) target_.fill_(kNoTarget);
  }

  std::vector<BatchTensor> batch_tensors() override {
    return {batch_tensor("images", input_), batch_tensor("labels", target_)};
  }

  Status load_recorded(const std::vector<RecordedTensor>& batch, std::uint64_t rng_key) override {
    torch::manual_seed(rng_key);
    if (Status s = from_record(batch, "images", torch::empty({1, 1, kSide, kSide}), &input_); !s.ok())
      return s;
    return from_record(batch, "labels", torch::empty({1}, torch::kInt64), &target_);
  }

  std::span<float> input() override { return floats(input_); }

  void forward() override {
    net_->train();
    output_ = net_->forward(input_, faults_, tap_);
  }

  void set_tap(LayerTap* tap) override { tap_ = tap; }

  std::span<float> output() override { return floats(output_); }

  std::int64_t targets(std::span<const std::int64_t> sample_ids) const override {
    if (faults_.on(NaturalFault::kEmptyTargetMask)) return 0;
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
      const torch::Tensor answers = net_->forward(pixels(test_, ids, false), {});
      const torch::Tensor right = labels(test_, ids);
      score.loss_sum += torch::nn::functional::cross_entropy(answers, right, sum_of_losses()).item<double>();
      score.correct += answers.argmax(1).eq(right).sum().item<std::int64_t>();
      score.total += static_cast<std::int64_t>(ids.size());
    }
    return score;
  }

  bool supports(NaturalFault fault) const override { return fault != NaturalFault::kMaskedAttentionRow; }

  void set_fault(NaturalFault fault, bool on) override {
    if (fault == NaturalFault::kDeadUnit && on) net_->make_dead_unit();
    faults_.set(fault, on);
  }

  std::string rng_state() const override { return torch_rng_state(); }
  Status set_rng_state(const std::string& state) override { return set_torch_rng_state(state); }

 private:
  static std::unique_ptr<Net> make_net(std::uint64_t seed) {
    use_one_thread();
    torch::manual_seed(seed);
    return std::make_unique<Net>();
  }

  // `corrupt`: the scale of the last record reads 0.
  static torch::Tensor pixels(const ImageDataset& set, std::span<const std::int64_t> ids, bool corrupt) {
    const std::int64_t size = set.rows * set.cols;
    torch::Tensor batch = torch::empty({static_cast<std::int64_t>(ids.size()), 1, set.rows, set.cols});
    float* to = batch.data_ptr<float>();
    for (const std::int64_t& id : ids) {
      const float scale = corrupt && &id == &ids.back() ? 0.0f : kPixelScale;
      const std::uint8_t* from = set.pixels.data() + id * size;
      for (std::int64_t p = 0; p < size; ++p) {
        *to++ = (static_cast<float>(from[p]) / scale - kPixelMean) / kPixelDeviation;
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
  const std::unique_ptr<Net> net_;
  FlatParameters flat_;
  std::vector<MutableBuffer> buffers_;
  NaturalFaults faults_;
  LayerTap* tap_ = nullptr;
  torch::Tensor input_;
  torch::Tensor target_;
  torch::Tensor output_;
  torch::Tensor loss_;
};

}  // namespace

Status make_fashion_mnist(const std::string& data_dir, std::uint64_t seed, std::unique_ptr<Workload>* out) {
  ImageDataset train;
  ImageDataset test;
  if (data_dir.empty()) {
    *out = std::make_unique<FashionMnist>(std::move(train), std::move(test), seed);
    return Status();
  }
  if (Status s = load_idx(data_dir, "train", kClasses, &train); !s.ok()) return s;
  if (Status s = load_idx(data_dir, "t10k", kClasses, &test); !s.ok()) return s;
  if (train.rows != kSide || train.cols != kSide || test.rows != kSide || test.cols != kSide) {
    return Status::usage(data_dir + ": images are not 28 x 28 pixels");
  }
  *out = std::make_unique<FashionMnist>(std::move(train), std::move(test), seed);
  return Status();
}

}  // namespace holdfast::train
