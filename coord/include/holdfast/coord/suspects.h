// Whether one device is behind repeated incidents.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace holdfast {

// Data that is bad makes any device fail; a device that is bad makes the same one fail again and again. This
// counts, and says so; it does not prove: a rank whose data shard is bad looks the same, until another device
// has computed the same batch.
class Suspects {
 public:
  // A device is suspect once it alone was the origin of this many incidents, and of at least half of all that
  // had a single origin.
  explicit Suspects(std::uint64_t threshold) : threshold_(threshold) {}

  // The devices on which an incident began, with repeats for ranks that share one. Several devices at once
  // point at none of them.
  void count(const std::vector<std::string>& devices);

  // An incident that was counted for `device` alone is not the device's: another one has computed the same.
  void take_back(const std::string& device);

  bool is_suspect(const std::string& device) const;

  // For the run's memory: a device is not cleared by a restart.
  const std::map<std::string, std::uint64_t>& incidents() const { return incidents_; }
  std::uint64_t single_origin() const { return single_origin_; }
  void restore(std::map<std::string, std::uint64_t> incidents, std::uint64_t single_origin);

 private:
  const std::uint64_t threshold_;
  std::map<std::string, std::uint64_t> incidents_;  // by device
  std::uint64_t single_origin_ = 0;
};

}  // namespace holdfast
