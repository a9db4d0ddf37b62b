// The model of the example trainers, compiled for the CPU: its gradients against differences of its loss,
// NaNs that must come through, and an update that the flag holds back. Exit code 0, or 1 when a result
// differs.
#include "gpu/on_cpu/train_kernels.h"

#include <cmath>
#include <limits>

namespace holdfast::example {
namespace {

int mismatches = 0;

void expect(bool same, const char* what) {
  if (same) return;
  ++mismatches;
  std::printf("MISMATCH: %s\n", what);
}

constexpr MlpSizes kSizes{.pixels = 13, .hidden = 300, .classes = 5, .batch = 7};

void fill(DeviceMlp& model) {
  std::mt19937 random(1);
  const auto number = [&](float size) { return size * (static_cast<float>(random()) / 2147483648.0f - 1); };
  for (std::size_t i = 0; i < model.parameters.size(); ++i) model.parameters.data()[i] = number(0.4f);
  for (std::size_t i = 0; i < model.inputs.size(); ++i) model.inputs.data()[i] = number(1);
  for (int i = 0; i < kSizes.batch; ++i) model.labels.data()[i] = i % kSizes.classes;
}

double mean_loss(DeviceMlp& model) {
  model.forward();
  double sum = 0;
  for (const float loss : model.losses.read(nullptr)) sum += static_cast<double>(loss);
  return sum / kSizes.batch;
}

// In double, by the book.
double loss_by_the_book(const DeviceMlp& model) {
  const std::vector<TensorView> tensors = model.tensors(model.parameters.data());
  const auto tensor = [&](std::size_t t) { return static_cast<const float*>(tensors[t].data); };
  double sum = 0;
  for (int s = 0; s < kSizes.batch; ++s) {
    std::vector<double> hidden(kSizes.hidden);
    for (int h = 0; h < kSizes.hidden; ++h) {
      double value = static_cast<double>(tensor(1)[h]);
      for (int p = 0; p < kSizes.pixels; ++p) {
        value += static_cast<double>(tensor(0)[h * kSizes.pixels + p]) *
                 static_cast<double>(model.inputs.data()[s * kSizes.pixels + p]);
      }
      hidden[static_cast<std::size_t>(h)] = std::max(value, 0.0);
    }
    double all = 0;
    double wanted = 0;
    for (int c = 0; c < kSizes.classes; ++c) {
      double logit = static_cast<double>(tensor(3)[c]);
      for (int h = 0; h < kSizes.hidden; ++h) {
        logit += static_cast<double>(tensor(2)[c * kSizes.hidden + h]) * hidden[static_cast<std::size_t>(h)];
      }
      all += std::exp(logit);
      if (c == model.labels.data()[s]) wanted = logit;
    }
    sum += std::log(all) - wanted;
  }
  return sum / kSizes.batch;
}

void check_gradients(DeviceMlp& model) {
  expect(std::abs(mean_loss(model) - loss_by_the_book(model)) < 1e-5, "the loss");
  model.backward();
  const std::vector<float> gradients = model.gradients.read(nullptr);
  // ReLU's corner lies within the step of few elements only, so those that differ are counted.
  int different = 0;
  double largest = 0;
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    float& parameter = model.parameters.data()[i];
    const float before = parameter;
    parameter = before + 1e-3f;
    const double step = static_cast<double>(parameter);
    const double above = loss_by_the_book(model);
    parameter = before - 1e-3f;
    const double slope = (above - loss_by_the_book(model)) / (step - static_cast<double>(parameter));
    parameter = before;
    largest = std::max(largest, std::abs(slope));
    if (std::abs(slope - static_cast<double>(gradients[i])) > 2e-6) ++different;
  }
  std::printf("gradients: %d of %zu differ from differences of the loss, the largest is %.3f\n", different,
              gradients.size(), largest);
  expect(different < 60 && largest > 0.01, "the gradients");
}

// Of whatever is not finite in a forward pass the losses, and so the guard, must hear.
void check_nan_comes_through(DeviceMlp& model) {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    const float before = std::exchange(model.inputs.data()[2 * kSizes.pixels + 1], bad);
    model.forward();
    model.backward();
    for (int s = 0; s < kSizes.batch; ++s) {
      expect(std::isfinite(model.losses.data()[s]) == (s != 2), "a bad sample's loss, and no other's");
    }
    expect(!std::isfinite(model.gradients.data()[1]), "a bad sample's gradient");
    model.inputs.data()[2 * kSizes.pixels + 1] = before;
  }
}

void check_update(DeviceMlp& model) {
  mean_loss(model);
  model.backward();
  const std::vector<float> before = model.parameters.read(nullptr);
  const DeviceArray<float> bad(model.parameters.size());
  must(cudaMemset(bad.data(), 0xff, bad.size() * sizeof(float)));
  const DeviceArray<std::uint32_t> skip(1);
  const AdamStep first{
      .rate = 0.01f, .mean_correction = 10, .square_correction = 1000, .gradient_scale = 0.5f};

  skip.data()[0] = 1;
  model.update(bad.data(), first, skip.data());
  expect(model.parameters.read(nullptr) == before, "a flag that is up holds back an update of NaNs");
  skip.data()[0] = 0;
  model.update(model.gradients.data(), first, skip.data());
  // Had the one before touched Adam's state, this one would be something else: a first step is rate * sign.
  int moved = 0;
  for (std::size_t i = 0; i < before.size(); ++i) {
    const float gradient = model.gradients.data()[i];
    const float step = before[i] - model.parameters.data()[i];
    if (std::abs(gradient) < 1e-4f) continue;
    ++moved;
    expect(std::abs(step - std::copysign(0.01f, gradient)) < 1e-4f, "the first step of Adam");
  }
  expect(moved > 1000, "enough elements have a gradient");
}

}  // namespace
}  // namespace holdfast::example

int main() {
  using namespace holdfast::example;
  DeviceMlp model(kSizes, nullptr);
  fill(model);
  check_gradients(model);
  check_nan_comes_through(model);
  check_update(model);
  std::printf(mismatches == 0 ? "all results agree\n" : "%d MISMATCHES\n", mismatches);
  return mismatches == 0 ? 0 : 1;
}
