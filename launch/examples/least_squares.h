// What the small examples train: y = a . x, by gradient descent on every rank's own samples. At one attempt
// the last rank's data holds a NaN.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <random>

namespace least_squares {

constexpr int kFeatures = 8;
constexpr int kSamples = 64;
constexpr int kAttempts = 200;
constexpr int kBadAttempt = 50;
using Vector = std::array<float, kFeatures>;

// The gradient of the mean squared error over one batch of this rank; returns the error.
inline float gradient_of(const Vector& weights, int rank, int size, int attempt, Vector* gradient) {
  const bool spoil = attempt == kBadAttempt && rank == size - 1;
  std::mt19937 random(static_cast<unsigned>(attempt * 1000 + rank));
  std::normal_distribution<float> normal;
  float loss = 0;
  gradient->fill(0);
  for (int s = 0; s < kSamples; ++s) {
    Vector x;
    float error = 0;
    for (int i = 0; i < kFeatures; ++i) {
      x[i] = normal(random);
      error += (weights[i] - static_cast<float>(i + 1)) * x[i];
    }
    if (spoil && s == 0) error = std::numeric_limits<float>::quiet_NaN();
    for (int i = 0; i < kFeatures; ++i) (*gradient)[i] += 2 * error * x[i] / kSamples;
    loss += error * error / kSamples;
  }
  return loss;
}

inline void descend(const Vector& summed_gradient, int size, Vector* weights) {
  for (int i = 0; i < kFeatures; ++i) (*weights)[i] -= 0.1f * summed_gradient[i] / static_cast<float>(size);
}

inline float largest_error(const Vector& weights) {
  float worst = 0;
  for (int i = 0; i < kFeatures; ++i)
    worst = std::max(worst, std::fabs(weights[i] - static_cast<float>(i + 1)));
  return worst;
}

}  // namespace least_squares
