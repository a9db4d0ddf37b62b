#include "holdfast/coord/suspects.h"

#include <algorithm>
#include <utility>

namespace holdfast {

void Suspects::count(const std::vector<std::string>& devices) {
  if (devices.empty() ||
      !std::ranges::all_of(devices, [&](const std::string& device) { return device == devices.front(); })) {
    return;
  }
  ++incidents_[devices.front()];
  ++single_origin_;
}

void Suspects::take_back(const std::string& device) {
  const auto found = incidents_.find(device);
  if (found == incidents_.end()) return;
  if (--found->second == 0) incidents_.erase(found);
  if (single_origin_ > 0) --single_origin_;
}

void Suspects::restore(std::map<std::string, std::uint64_t> incidents, std::uint64_t single_origin) {
  incidents_ = std::move(incidents);
  single_origin_ = single_origin;
}

bool Suspects::is_suspect(const std::string& device) const {
  const auto found = incidents_.find(device);
  return found != incidents_.end() && found->second >= threshold_ && 2 * found->second >= single_origin_;
}

}  // namespace holdfast
