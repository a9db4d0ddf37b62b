// Which few of many are enough for a failure: delta debugging (ddmin, Zeller and Hildebrandt, "Simplifying
// and Isolating Failure-Inducing Input", IEEE TSE 28(2), 2002).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

namespace holdfast {

struct MinimalSubset {
  std::vector<std::size_t> members;  // ascending
  std::uint64_t tests = 0;           // calls of `fails`
  // No single member can be taken away, and none are enough only if `members` is empty. False when the search
  // was ended before that was known: `members` are enough all the same.
  bool is_minimal = false;
};

// Starts from all of 0 .. count - 1, which must be enough. `fails` is asked of a subset, ascending, and of
// each subset at most once; nothing as an answer ends the search, as does `most_tests`. Asks first whether
// none are enough. One culprit among n takes about 2 log2(n) tests; in the worst case there are n^2.
MinimalSubset minimal_subset(
    std::size_t count, std::uint64_t most_tests,
    const std::function<std::optional<bool>(const std::vector<std::size_t>&)>& fails);

}  // namespace holdfast
