// Long arrays of which each rank holds a part, as one run or one generation has them. Each replica group has
// its own.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "holdfast/checkpoint/manifest.pb.h"

namespace holdfast {

class ShardedArrays {
 public:
  static ShardedArrays of(const Manifest& manifest);

  // `entry` of `rank` has a shard_total. Of a declared state or of a manifest; its numbers need not be sound.
  // `group`: the name of the rank's replica group, "" when there is only one.
  void add(const TensorEntry& entry, int rank, const std::string& group = "");

  // Why the shards do not make up each array, every element once; "" when they do.
  std::string fault() const;
  // The first array of which this has another kind or length than `other`, or which only one of them has, in
  // a sentence that calls them `mine` and `others`; "" when there is none.
  std::string difference(const ShardedArrays& other, const std::string& mine,
                         const std::string& others) const;

 private:
  struct Shard {
    std::uint64_t offset = 0;
    std::uint64_t elements = 0;
    int rank = 0;
  };
  struct Array {
    std::string dtype;
    std::uint64_t total = 0;
    std::vector<Shard> shards;
    std::string conflict;  // between ranks, on dtype or total

    std::string fault() const;
    std::string kind() const;
  };

  std::map<std::pair<std::string, std::string>, Array> arrays_;  // by group and name
};

// Elements as they are stored: complex128 counts twice.
std::uint64_t stored_elements(const TensorEntry& entry);

}  // namespace holdfast
