#include "holdfast/minimal_subset.h"

#include <xxhash.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

namespace holdfast {
namespace {

using Members = std::vector<std::size_t>;

class Search {
 public:
  Search(std::uint64_t most_tests, const std::function<std::optional<bool>(const Members&)>& fails)
      : most_tests_(most_tests), fails_(fails) {}

  MinimalSubset from(Members members) {
    const bool none_are_enough = fails({});
    if (none_are_enough) members.clear();
    for (std::size_t parts = 2; !ended_ && members.size() > 1;) {
      if (reduce(&members, &parts)) continue;
      if (parts == members.size()) break;
      parts = std::min(parts * 2, members.size());
    }
    return {std::move(members), tests_, !ended_};
  }

 private:
  // To one of `parts` parts of `members`, or to all but one of them, that is enough.
  bool reduce(Members* members, std::size_t* parts) {
    for (std::size_t i = 0; i < *parts && !ended_; ++i) {
      Members part = Members(begin_of(*members, *parts, i), begin_of(*members, *parts, i + 1));
      if (!fails(part)) continue;
      *members = std::move(part);
      *parts = 2;
      return true;
    }
    for (std::size_t i = 0; *parts > 2 && i < *parts && !ended_; ++i) {
      Members rest(members->cbegin(), begin_of(*members, *parts, i));
      rest.insert(rest.end(), begin_of(*members, *parts, i + 1), members->cend());
      if (!fails(rest)) continue;
      *members = std::move(rest);
      *parts = std::max<std::size_t>(*parts - 1, 2);
      return true;
    }
    return false;
  }

  static Members::const_iterator begin_of(const Members& members, std::size_t parts, std::size_t i) {
    return members.cbegin() + static_cast<std::ptrdiff_t>(members.size() * i / parts);
  }

  // 128 bits stand for a subset, which would take 8 bytes a member: none of a search has the same by chance.
  using Key = std::pair<std::uint64_t, std::uint64_t>;
  static Key key_of(const Members& members) {
    const XXH128_hash_t hash = XXH3_128bits(members.data(), members.size() * sizeof(std::size_t));
    return {hash.high64, hash.low64};
  }

  bool fails(const Members& members) {
    if (ended_) return false;
    const Key key = key_of(members);
    const auto known = known_.find(key);
    if (known != known_.end()) return known->second;
    std::optional<bool> answer;
    if (tests_ < most_tests_) {
      ++tests_;
      answer = fails_(members);
    }
    ended_ = !answer;
    return answer && known_.emplace(key, *answer).first->second;
  }

  const std::uint64_t most_tests_;
  const std::function<std::optional<bool>(const Members&)>& fails_;
  std::map<Key, bool> known_;
  std::uint64_t tests_ = 0;
  bool ended_ = false;
};

}  // namespace

MinimalSubset minimal_subset(
    std::size_t count, std::uint64_t most_tests,
    const std::function<std::optional<bool>(const std::vector<std::size_t>&)>& fails) {
  Members all(count);
  std::iota(all.begin(), all.end(), std::size_t{0});
  return Search(most_tests, fails).from(std::move(all));
}

}  // namespace holdfast
