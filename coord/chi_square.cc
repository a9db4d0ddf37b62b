#include "holdfast/coord/chi_square.h"

#include <cmath>
#include <limits>

namespace holdfast {
namespace {

constexpr double kPrecision = 1e-15;
constexpr int kMostTerms = 10'000;

// P(a, x): converges fast for x < a + 1.
double lower_by_series(double a, double x) {
  double term = 1.0 / a;
  double sum = term;
  for (int n = 1; n < kMostTerms && term > sum * kPrecision; ++n) {
    term *= x / (a + n);
    sum += term;
  }
  return sum * std::exp(a * std::log(x) - x - std::lgamma(a));
}

// Q(a, x): converges fast for x > a + 1. Lentz's method.
double upper_by_fraction(double a, double x) {
  constexpr double kTiny = std::numeric_limits<double>::min() / kPrecision;
  double b = x + 1.0 - a;
  double c = 1.0 / kTiny;
  double d = 1.0 / b;
  double h = d;
  for (int n = 1; n < kMostTerms; ++n) {
    const double numerator = -n * (n - a);
    b += 2.0;
    d = numerator * d + b;
    if (std::abs(d) < kTiny) d = kTiny;
    c = b + numerator / c;
    if (std::abs(c) < kTiny) c = kTiny;
    d = 1.0 / d;
    h *= d * c;
    if (std::abs(d * c - 1.0) < kPrecision) break;
  }
  return h * std::exp(a * std::log(x) - x - std::lgamma(a));
}

}  // namespace

double chi_square_tail(double value, int degrees) {
  if (!(value > 0)) return 1.0;
  const double a = degrees / 2.0;
  const double x = value / 2.0;
  return x < a + 1.0 ? 1.0 - lower_by_series(a, x) : upper_by_fraction(a, x);
}

std::optional<GoodnessOfFit> goodness_of_fit(std::span<const std::uint64_t> observed,
                                             std::span<const std::uint64_t> weights) {
  constexpr double kLeastExpected = 5.0;  // below, the statistic is not distributed as the formula has it
  std::uint64_t total = 0;
  std::uint64_t weight = 0;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    if (weights[i] == 0) continue;
    total += observed[i];
    weight += weights[i];
  }
  GoodnessOfFit fit;
  double furthest = -std::numeric_limits<double>::infinity();
  int cells = 0;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    if (weights[i] == 0) continue;
    const double expected =
        static_cast<double>(total) * (static_cast<double>(weights[i]) / static_cast<double>(weight));
    if (expected < kLeastExpected) return std::nullopt;
    const double over = (static_cast<double>(observed[i]) - expected) / std::sqrt(expected);
    fit.statistic += over * over;
    ++cells;
    if (over <= furthest) continue;
    furthest = over;
    fit.most_over = i;
    fit.most_over_expected = expected;
  }
  if (cells < 2) return std::nullopt;
  fit.degrees = cells - 1;
  fit.p = chi_square_tail(fit.statistic, fit.degrees);
  return fit;
}

}  // namespace holdfast
