// Times contenders against each other in one run, in turns, so that what disturbs one disturbs all.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <functional>
#include <vector>

namespace holdfast::bench {

// Median seconds of one call of each, over `rounds` rounds in which each is called about `least_seconds`
// long.
inline std::vector<double> contest(const std::vector<std::function<void()>>& contenders, int rounds,
                                   double least_seconds) {
  using Clock = std::chrono::steady_clock;
  const auto time = [](const std::function<void()>& run, std::size_t calls) {
    const auto begin = Clock::now();
    for (std::size_t i = 0; i < calls; ++i) run();
    return std::chrono::duration<double>(Clock::now() - begin).count() / static_cast<double>(calls);
  };
  std::vector<std::size_t> calls;
  for (const auto& run : contenders) {
    time(run, 1);  // pages, caches
    calls.push_back(std::max<std::size_t>(1, static_cast<std::size_t>(least_seconds / time(run, 1))));
  }
  std::vector<std::vector<double>> seconds(contenders.size());
  for (int round = 0; round < rounds; ++round) {
    for (std::size_t c = 0; c < contenders.size(); ++c) seconds[c].push_back(time(contenders[c], calls[c]));
  }
  std::vector<double> medians;
  for (std::vector<double>& all : seconds) {
    std::ranges::sort(all);
    medians.push_back(all[all.size() / 2]);
  }
  return medians;
}

}  // namespace holdfast::bench
