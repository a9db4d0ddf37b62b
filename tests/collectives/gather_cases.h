// A gather of which only so many entries of each node arrive.
#pragma once

#include <gtest/gtest.h>

#include <limits>
#include <map>
#include <string>
#include <vector>

#include "holdfast/collectives/collective.h"

namespace holdfast {

// The first `most` ranks of each node that have something to say; `node_of(r)` tells nodes apart.
template <typename Message, typename NodeOf>
std::vector<Bytes> expected_gather(int size, int most, Message&& message, NodeOf&& node_of) {
  std::vector<Bytes> expected(static_cast<std::size_t>(size));
  std::map<int, int> kept;
  for (int r = 0; r < size; ++r) {
    const Bytes bytes = message(r);
    if (bytes.empty() || kept[node_of(r)] >= most) continue;
    ++kept[node_of(r)];
    expected[static_cast<std::size_t>(r)] = bytes;
  }
  return expected;
}

template <typename Message, typename NodeOf>
void expect_capped_gather(Collective& collective, int most, Message&& message, NodeOf&& node_of) {
  std::vector<Bytes> all;
  if (collective.rank() == 0) all = {"left", "over"};
  EXPECT_TRUE(collective.gather(message(collective.rank()), &all, most).ok());
  if (collective.rank() == 0) {
    EXPECT_TRUE(all == expected_gather(collective.size(), most, message, node_of))
        << "most per node: " << most;
  } else {
    EXPECT_TRUE(all.empty());
  }
}

// Called on every rank.
template <typename NodeOf>
void expect_capped_gathers(Collective& collective, NodeOf&& node_of) {
  const auto from_all = [](int r) { return "rank " + std::to_string(r); };
  const auto from_none = [](int) { return Bytes(); };
  const auto from_odd = [](int r) { return r % 2 == 1 ? "odd " + std::to_string(r) : Bytes(); };
  const auto from_all_but_0 = [](int r) {
    return r == 0 ? Bytes() : Bytes(static_cast<std::size_t>(r), 'x');
  };
  const auto binary = [](int r) {
    Bytes bytes(static_cast<std::size_t>(r) * 37 + 1, '\0');
    for (std::size_t i = 0; i < bytes.size(); ++i)
      bytes[i] = static_cast<char>(static_cast<int>(i) * 7 + r * 13);
    return bytes;
  };
  const auto large = [](int r) { return Bytes(300'000, static_cast<char>('a' + r)); };
  for (const int most : {0, 1, 2, 3, 1000, std::numeric_limits<int>::max()}) {
    expect_capped_gather(collective, most, from_all, node_of);
    expect_capped_gather(collective, most, from_none, node_of);
    expect_capped_gather(collective, most, from_odd, node_of);
    expect_capped_gather(collective, most, from_all_but_0, node_of);
    expect_capped_gather(collective, most, binary, node_of);
    expect_capped_gather(collective, most, large, node_of);
  }
}

}  // namespace holdfast
