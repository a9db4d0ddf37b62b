#include "train/gpt.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "train/text_dataset.h"
#include "train/torch_support.h"

namespace holdfast::train {
namespace {

constexpr std::int64_t kBytes = 256;  // the vocabulary
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

torch::nn::LayerNorm layer_norm(std::int64_t width) {
  return torch::nn::LayerNorm(torch::nn::LayerNormOptions({width}));
}

struct Attention : torch::nn::Module {
  explicit Attention(const GptOptions& options)
      : heads(options.heads),
        qkv(register_module("qkv", torch::nn::Linear(options.width, 3 * options.width))),
        projection(register_module("projection", torch::nn::Linear(options.width, options.width))),
        dropout(register_module("dropout", torch::nn::Dropout(options.dropout))),
        future(torch::ones({options.context, options.context}, torch::kBool).triu(1)) {}

  // `x` is batch x context x width.
  torch::Tensor forward(const torch::Tensor& x, bool mask_a_row) {
    const std::int64_t batch = x.size(0);
    const std::int64_t context = x.size(1);
    const std::int64_t width = x.size(2);
    const std::vector<torch::Tensor> parts =
        qkv(x).view({batch, context, 3, heads, width / heads}).permute({2, 0, 3, 1, 4}).unbind(0);
    const double scale = 1.0 / std::sqrt(static_cast<double>(width / heads));
    torch::Tensor scores = torch::matmul(parts[0] * scale, parts[1].transpose(-2, -1));
    scores = scores.masked_fill(future, kMinusInfinity);
    const torch::Tensor row = mask_a_row ? last_row(batch, context) : torch::Tensor();
    if (mask_a_row) scores = scores.masked_fill(row, kMinusInfinity);
    torch::Tensor mixed = torch::matmul(dropout(torch::softmax(scores, -1)), parts[2]);
    // Forward is finite again, but backward meets the row's NaN: 0 x NaN is NaN.
    if (mask_a_row) mixed = torch::where(row, 0.0f, mixed);
    return projection(mixed.transpose(1, 2).reshape({batch, context, width}));
  }

  // Of the last record, the last position, in every head.
  static torch::Tensor last_row(std::int64_t batch, std::int64_t context) {
    torch::Tensor row = torch::zeros({batch, 1, context, 1}, torch::kBool);
    row[batch - 1][0][context - 1] = true;
    return row;
  }

  const std::int64_t heads;
  torch::nn::Linear qkv;
  torch::nn::Linear projection;
  torch::nn::Dropout dropout;
  const torch::Tensor future;  // context x context: what a position must not see
};

struct Mlp : torch::nn::Module {
  explicit Mlp(std::int64_t width)
      : expand(register_module("expand", torch::nn::Linear(width, 4 * width))),
        contract(register_module("contract", torch::nn::Linear(4 * width, width))) {}

  torch::Tensor forward(const torch::Tensor& x, bool overgrown) {
    if (overgrown) return contract(torch::gelu(expand(x) * kOvergrowth)) * kOvergrowth;
    return contract(torch::gelu(expand(x)));
  }

  torch::nn::Linear expand;
  torch::nn::Linear contract;
};

struct Block : torch::nn::Module {
  explicit Block(const GptOptions& options)
      : norm1(register_module("norm1", layer_norm(options.width))),
        attention(register_module("attention", std::make_shared<Attention>(options))),
        norm2(register_module("norm2", layer_norm(options.width))),
        mlp(register_module("mlp", std::make_shared<Mlp>(options.width))),
        dropout(register_module("dropout", torch::nn::Dropout(options.dropout))) {}

  torch::Tensor forward(torch::Tensor x, const NaturalFaults& faults) {
    x = x + dropout(attention->forward(norm1(x), faults.on(NaturalFault::kMaskedAttentionRow)));
    return x + dropout(mlp->forward(norm2(x), faults.on(NaturalFault::kActivationOverflow)));
  }

  torch::nn::LayerNorm norm1;
  std::shared_ptr<Attention> attention;
  torch::nn::LayerNorm norm2;
  std::shared_ptr<Mlp> mlp;
  torch::nn::Dropout dropout;
};

struct Transformer : torch::nn::Module {
  explicit Transformer(const GptOptions& options)
      : token_embedding(register_module("token_embedding", torch::nn::Embedding(kBytes, options.width))),
        position_embedding(
            register_module("position_embedding", torch::nn::Embedding(options.context, options.width))),
        dropout(register_module("dropout", torch::nn::Dropout(options.dropout))),
        blocks(register_module("blocks", torch::nn::ModuleList())),
        norm(register_module("norm", layer_norm(options.width))),
        head(register_module(
            "head", torch::nn::Linear(torch::nn::LinearOptions(options.width, kBytes).bias(false)))) {
    for (std::int64_t i = 0; i < options.layers; ++i) blocks->push_back(std::make_shared<Block>(options));
  }

  // As GPT-2: small normal weights, so that the first predictions are nearly uniform.
  void initialise() {
    torch::NoGradGuard no_grad;
    for (const auto& module : modules()) {
      if (auto* linear = module->as<torch::nn::Linear>()) {
        linear->weight.normal_(0.0, 0.02);
        if (linear->bias.defined()) linear->bias.zero_();
      } else if (auto* embedding = module->as<torch::nn::Embedding>()) {
        embedding->weight.normal_(0.0, 0.02);
      }
    }
  }

  // `tokens` is batch x context.
  torch::Tensor embed(const torch::Tensor& tokens) {
    return token_embedding(tokens) + position_embedding->weight;
  }

  // From the embedded text to the logits. Faults strike the first block.
  torch::Tensor forward(torch::Tensor x, const NaturalFaults& faults, LayerTap* tap = nullptr) {
    x = dropout(x);
    for (std::size_t i = 0; i < blocks->size(); ++i) {
      const std::string name = "blocks." + std::to_string(i);
      x = tapped(blocks->at<Block>(i).forward(x, i == 0 ? faults : NaturalFaults()), name, tap);
    }
    return tapped(head(tapped(norm(x), "norm", tap)), "head", tap);
  }

  torch::nn::Embedding token_embedding;
  torch::nn::Embedding position_embedding;
  torch::nn::Dropout dropout;
  torch::nn::ModuleList blocks;
  torch::nn::LayerNorm norm;
  torch::nn::Linear head;
};

// Of several windows, as rows.
struct Batch {
  torch::Tensor tokens;
  torch::Tensor targets;
};

class Gpt final : public Workload {
 public:
  Gpt(TextDataset text, std::uint64_t seed, const GptOptions& options)
      : text_(std::move(text)), width_(options.width), net_(make_net(seed, options)), flat_(*net_) {}

  std::span<float> parameters() override { return flat_.parameters(); }
  std::span<float> gradients() override { return flat_.gradients(); }
  std::span<const BucketSlice> layout() const override { return flat_.layout(); }
  std::span<const MutableBuffer> buffers() const override { return {}; }
  std::int64_t training_samples() const override { return text_.training_windows(); }
  std::int64_t test_samples() const override { return text_.held_out_windows(); }
  std::int64_t input_elements(std::int64_t batch) const override { return batch * text_.context * width_; }
  std::int64_t output_elements(std::int64_t batch) const override { return batch * text_.context * kBytes; }

  std::int64_t targets(std::span<const std::int64_t> sample_ids) const override {
    if (faults_.on(NaturalFault::kEmptyTargetMask)) return 0;
    std::size_t count = 0;
    for (const std::int64_t id : sample_ids) count += text_.training_window(id).targets.size();
    return static_cast<std::int64_t>(count);
  }
  bool variable_targets() const override { return true; }

  void load(std::span<const std::int64_t> sample_ids, std::uint64_t rng_key) override {
    torch::manual_seed(rng_key);
    std::vector<TextWindow> windows;
    for (const std::int64_t id : sample_ids) windows.push_back(text_.training_window(id));
    batch_ = rows(windows);
    if (faults_.on(NaturalFault::kEmptyTargetMask)) batch_.targets.fill_(kNoTarget);
    embed();
  }

  std::vector<BatchTensor> batch_tensors() override {
    return {batch_tensor("tokens", batch_.tokens), batch_tensor("targets", batch_.targets)};
  }

  Status load_recorded(const std::vector<RecordedTensor>& batch, std::uint64_t rng_key) override {
    torch::manual_seed(rng_key);
    const torch::Tensor wanted = torch::empty({1, text_.context}, torch::kInt64);
    if (Status s = from_record(batch, "tokens", wanted, &batch_.tokens); !s.ok()) return s;
    if (Status s = from_record(batch, "targets", wanted, &batch_.targets); !s.ok()) return s;
    const bool in_range =
        batch_.tokens.ge(0).logical_and(batch_.tokens.lt(kBytes)).all().item<bool>() &&
        batch_.targets.ge(kNoTarget).logical_and(batch_.targets.lt(kBytes)).all().item<bool>();
    if (!in_range) return Status::usage("the record holds tokens that are no bytes");
    embed();
    return Status();
  }

  void set_tap(LayerTap* tap) override { tap_ = tap; }

  void embed() {
    net_->train();
    input_ = net_->embed(batch_.tokens);
    if (faults_.on(NaturalFault::kCorruptRecord)) {
      // A short record is to be as strong as a full one, but the length of the last one reads 0.
      torch::Tensor fill = torch::ones({input_.size(0), 1, 1});
      fill[-1] = 0.0f;
      input_ = input_ / fill;
    }
  }

  std::span<float> input() override { return floats(input_); }
  void forward() override { output_ = net_->forward(input_, faults_, tap_); }
  std::span<float> output() override { return floats(output_); }

  void compute_loss(double denominator) override {
    loss_ = sum_of_losses_of(output_, batch_.targets) / denominator;
  }
  std::span<float, 1> loss() override { return std::span<float, 1>(loss_.data_ptr<float>(), 1); }

  void backward(float scale) override { loss_.backward(torch::full({}, scale)); }

  Score evaluate(std::int64_t begin, std::int64_t end) override {
    constexpr std::int64_t kBatch = 32;
    torch::NoGradGuard no_grad;
    net_->eval();
    Score score;
    for (std::int64_t from = begin; from < end; from += kBatch) {
      std::vector<TextWindow> windows;
      for (std::int64_t number = from; number < std::min(from + kBatch, end); ++number) {
        windows.push_back(text_.held_out_window(number));
        score.total += static_cast<std::int64_t>(windows.back().targets.size());
      }
      const Batch batch = rows(windows);
      const torch::Tensor logits = net_->forward(net_->embed(batch.tokens), {});
      score.loss_sum += sum_of_losses_of(logits, batch.targets).item<double>();
      score.correct += logits.argmax(-1).eq(batch.targets).sum().item<std::int64_t>();
    }
    return score;
  }

  // Bytes that a text does not hold are dead units already: their embeddings get no gradient.
  bool supports(NaturalFault fault) const override { return fault != NaturalFault::kDroppedSquareRoot; }
  void set_fault(NaturalFault fault, bool on) override { faults_.set(fault, on); }

  std::string rng_state() const override { return torch_rng_state(); }
  Status set_rng_state(const std::string& state) override { return set_torch_rng_state(state); }

 private:
  static std::shared_ptr<Transformer> make_net(std::uint64_t seed, const GptOptions& options) {
    use_one_thread();
    torch::manual_seed(seed);
    auto net = std::make_shared<Transformer>(options);
    net->initialise();
    return net;
  }

  Batch rows(const std::vector<TextWindow>& windows) const {
    const auto count = static_cast<std::int64_t>(windows.size());
    Batch batch{torch::empty({count, text_.context}, torch::kInt64),
                torch::empty({count, text_.context}, torch::kInt64)};
    const auto row = [&](torch::Tensor& all, std::size_t i) {
      const auto context = static_cast<std::size_t>(text_.context);
      return std::span(all.data_ptr<std::int64_t>() + i * context, context);
    };
    for (std::size_t i = 0; i < windows.size(); ++i) {
      windows[i].copy_to(row(batch.tokens, i), row(batch.targets, i));
    }
    return batch;
  }

  static torch::Tensor sum_of_losses_of(const torch::Tensor& logits, const torch::Tensor& targets) {
    return torch::nn::functional::cross_entropy(logits.view({-1, kBytes}), targets.view(-1), sum_of_losses());
  }

  const TextDataset text_;
  const std::int64_t width_;
  const std::shared_ptr<Transformer> net_;
  FlatParameters flat_;
  NaturalFaults faults_;
  LayerTap* tap_ = nullptr;
  Batch batch_;
  torch::Tensor input_;
  torch::Tensor output_;
  torch::Tensor loss_;
};

}  // namespace

Status make_gpt(const std::vector<std::string>& paths, std::uint64_t seed, const GptOptions& options,
                std::unique_ptr<Workload>* out) {
  if (options.layers < 1 || options.heads < 1 || options.width < 1 || options.width % options.heads != 0) {
    return Status::usage("gpt: " + std::to_string(options.layers) + " layers of width " +
                         std::to_string(options.width) + " with " + std::to_string(options.heads) +
                         " heads; each must be at least 1, and the width a multiple of the heads");
  }
  if (!(options.dropout >= 0.0 && options.dropout < 1.0)) {
    return Status::usage("gpt: dropout " + std::to_string(options.dropout) + ", must be in [0, 1)");
  }
  TextDataset text;
  text.context = options.context;
  if (paths.empty()) {
    *out = std::make_unique<Gpt>(std::move(text), seed, options);
    return Status();
  }
  if (Status s = load_text(paths, options.context, &text); !s.ok()) return s;
  *out = std::make_unique<Gpt>(std::move(text), seed, options);
  return Status();
}

}  // namespace holdfast::train
