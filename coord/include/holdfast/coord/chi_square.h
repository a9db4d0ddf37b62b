// Whether counts look as if they were drawn from given shares.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

namespace holdfast {

// The probability that a chi-square variable of `degrees` of freedom, at least 1, is `value` or more: the
// regularised upper incomplete gamma function Q(degrees / 2, value / 2), by its series (DLMF 8.7.1) or its
// continued fraction (DLMF 8.9.2). Accurate to some 1e-12 relative.
double chi_square_tail(double value, int degrees);

struct GoodnessOfFit {
  double statistic = 0;  // the sum of (observed - expected)^2 / expected
  int degrees = 0;       // of freedom: cells - 1
  double p = 1;
  std::size_t most_over = 0;  // the cell that exceeds what is expected by the most standard deviations
  double most_over_expected = 0;
};

// Pearson's test of `observed` against shares proportional to `weights`, of the same size. Cells of weight 0
// are left out. None when there are fewer than two cells, or when one expects fewer than five: too few to
// say.
std::optional<GoodnessOfFit> goodness_of_fit(std::span<const std::uint64_t> observed,
                                             std::span<const std::uint64_t> weights);

}  // namespace holdfast
