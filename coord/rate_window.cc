#include "holdfast/coord/rate_window.h"

#include <algorithm>

namespace holdfast {

void RateWindow::advance(std::uint64_t attempt) {
  made_ = attempt;
  while (!skips_.empty() && !holds(skips_.front())) skips_.pop_front();
}

void RateWindow::add_skip(std::uint64_t attempt) {
  if (!holds(attempt)) return;
  skips_.insert(std::ranges::upper_bound(skips_, attempt), attempt);
  if (skips_.size() > most_skips_) skips_.pop_front();
}

}  // namespace holdfast
