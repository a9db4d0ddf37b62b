// Two contenders, one of which is the other's measure, in the same run.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace holdfast::bench {

inline double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

// Of the median of many independent values, 95 %: from the binomial distribution of how many lie below it.
inline std::pair<double, double> median_interval(std::vector<double> values) {
  std::ranges::sort(values);
  const double count = static_cast<double>(values.size());
  const double reach = 0.98 * std::sqrt(count);
  const auto at = [&](double place) {
    return values[static_cast<std::size_t>(std::clamp(place, 0.0, count - 1))];
  };
  return {at(std::floor(count / 2 - reach)), at(std::ceil(count / 2 + reach))};
}

inline double seconds(const std::function<void()>& run) {
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  run();
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

struct Ratios {
  double ratio = 0;    // contender over base
  double control = 0;  // base over base
  double base_seconds = 0;
};

// Each round runs the base before and after the contender, so that what disturbs one disturbs both. Both
// return the seconds that count. Medians over the rounds.
inline Ratios paired(const std::function<double()>& base, const std::function<double()>& contender,
                     int rounds) {
  std::vector<double> ratios, controls, bases;
  base();
  contender();
  for (int round = 0; round < rounds; ++round) {
    const double first = base();
    const double middle = contender();
    const double last = base();
    ratios.push_back(middle / ((first + last) / 2));
    controls.push_back(last / first);
    bases.push_back(first);
  }
  return {median(ratios), median(controls), median(bases)};
}

inline void print_ratio(const std::string& name, const Ratios& ratios) {
  fmt::print("ratio {}={:.3f} control={:.3f}\n", name, ratios.ratio, ratios.control);
}

}  // namespace holdfast::bench
