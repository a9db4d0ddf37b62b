// What every Collective does, whatever it runs over. A backend's test runs each case on all ranks of a group.
#pragma once

#include <gtest/gtest.h>

#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "holdfast/collectives/collective.h"

namespace holdfast::conformance {

// Called on every rank of a group. Only EXPECTs: a rank that left early would leave the others waiting.
struct Case {
  const char* name;
  void (*on_each_rank)(Collective&);
};
inline void PrintTo(const Case& test, std::ostream* out) { *out << test.name; }

// What rank r contributes in round `round`: large enough that the sums wrap.
inline Record contribution(int rank, int round) {
  Record record;
  std::mt19937_64 random(static_cast<std::uint64_t>(rank) * 1000003u + static_cast<std::uint64_t>(round));
  for (std::uint64_t& lane : record.lanes()) lane = random();
  return record;
}

inline Record expected_sum(int size, int round) {
  Record sum;
  for (int r = 0; r < size; ++r) sum += contribution(r, round);
  return sum;
}

inline void expect_reduce(Collective& collective, int round) {
  Record record = contribution(collective.rank(), round);
  EXPECT_TRUE(collective.reduce(record).ok());
  EXPECT_EQ(record, expected_sum(collective.size(), round)) << "rank " << collective.rank();
}

// `message(r)` is what rank r sends.
template <typename Message>
void expect_gather(Collective& collective, Message&& message) {
  std::vector<Bytes> all;
  if (collective.rank() == 0) all = {"left", "over", "from", "an", "earlier", "call", "of", "many", "more"};
  EXPECT_TRUE(collective.gather(message(collective.rank()), &all).ok());
  if (collective.rank() != 0) {
    EXPECT_TRUE(all.empty());
    return;
  }
  EXPECT_EQ(all.size(), static_cast<std::size_t>(collective.size()));
  for (std::size_t r = 0; r < all.size(); ++r) {
    EXPECT_TRUE(all[r] == message(static_cast<int>(r)))
        << "from rank " << r << ": " << all[r].size() << " bytes";
  }
}

inline void expect_broadcast(Collective& collective, const Bytes& from_root) {
  // What other ranks hold is of no account, longer or shorter.
  Bytes bytes =
      collective.rank() == 0 ? from_root : Bytes(static_cast<std::size_t>(collective.rank()) * 7, '?');
  EXPECT_TRUE(collective.broadcast(&bytes).ok());
  EXPECT_TRUE(bytes == from_root) << "rank " << collective.rank() << " got " << bytes.size() << " bytes";
}

inline Bytes random_bytes(std::size_t size, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  Bytes bytes(size, '\0');
  for (char& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

inline void every_rank_has_its_number(Collective& collective) {
  EXPECT_GE(collective.rank(), 0);
  EXPECT_LT(collective.rank(), collective.size());
  // Each number once: rank r counts in lane r alone.
  Record record;
  record.lanes()[static_cast<std::size_t>(collective.rank())] = 1;
  EXPECT_TRUE(collective.reduce(record).ok());
  for (std::size_t lane = 0; lane < Record::kLanes; ++lane) {
    EXPECT_EQ(record.lanes()[lane], lane < static_cast<std::size_t>(collective.size()) ? 1u : 0u);
  }
}

inline void reduce_sums_each_lane_and_wraps(Collective& collective) {
  Record record;
  record.lanes()[3] = ~std::uint64_t{0};
  record.lanes()[31] = static_cast<std::uint64_t>(collective.rank()) + 1;
  EXPECT_TRUE(collective.reduce(record).ok());
  const auto n = static_cast<std::uint64_t>(collective.size());
  EXPECT_EQ(record.lanes()[3], std::uint64_t{0} - n);
  EXPECT_EQ(record.lanes()[31], n * (n + 1) / 2);
  expect_reduce(collective, 0);
}

inline void a_thousand_reduces_keep_their_order(Collective& collective) {
  for (int round = 0; round < 1000; ++round) expect_reduce(collective, round);
}

inline void gather_of_nothing_is_an_empty_entry_from_each(Collective& collective) {
  expect_gather(collective, [](int) { return Bytes(); });
}

inline void gather_keeps_messages_of_different_lengths_apart(Collective& collective) {
  expect_gather(collective, [](int r) {
    return Bytes(static_cast<std::size_t>(r) * 100 + 1, static_cast<char>('a' + r));
  });
}

inline void gather_from_some_ranks_only(Collective& collective) {
  expect_gather(collective, [](int r) { return r % 2 == 1 ? "rank " + std::to_string(r) : Bytes(); });
  expect_gather(collective, [](int r) { return r % 2 == 0 ? "rank " + std::to_string(r) : Bytes(); });
}

inline void gather_keeps_every_byte(Collective& collective) {
  expect_gather(collective, [](int r) {
    return Bytes("\0a\0\xff\n", 5) + Bytes(1, static_cast<char>(r)) + Bytes(1, '\0');
  });
  expect_gather(collective, [](int r) { return random_bytes(1000, static_cast<std::uint64_t>(r)); });
}

inline void gather_of_a_mebibyte_from_each(Collective& collective) {
  expect_gather(collective,
                [](int r) { return random_bytes(std::size_t{1} << 20, static_cast<std::uint64_t>(r)); });
}

inline void broadcast_of_nothing(Collective& collective) { expect_broadcast(collective, Bytes()); }

inline void broadcast_keeps_every_byte(Collective& collective) {
  expect_broadcast(collective, Bytes("\0b\0\xfe\n\0", 6));
  expect_broadcast(collective, random_bytes(1000, 5));
}

inline void broadcast_of_four_mebibytes(Collective& collective) {
  expect_broadcast(collective, random_bytes(std::size_t{4} << 20, 6));
}

inline void mixed_sequences_never_mix_their_messages(Collective& collective) {
  std::mt19937 random(7);  // the same draws on every rank
  for (int round = 0; round < 300; ++round) {
    const auto size = static_cast<std::size_t>(random() % 5000);
    switch (random() % 3) {
      case 0: expect_reduce(collective, round); break;
      case 1:
        expect_gather(collective, [&](int r) {
          return (r + round) % 3 == 0 ? Bytes()
                                      : Bytes(size + static_cast<std::size_t>(r), static_cast<char>(round));
        });
        break;
      default: expect_broadcast(collective, Bytes(size, static_cast<char>(round))); break;
    }
  }
}

// Every rank gets the failure of the lowest rank in `failing`, and can go on afterwards.
inline void expect_agreed_status(Collective& collective, const std::vector<int>& failing) {
  Status mine;
  for (const int r : failing) {
    if (r == collective.rank()) mine = Status(StatusCode::kUsage, "no file: r" + std::to_string(r));
  }
  const Status agreed = agree_on_status(collective, mine);
  if (failing.empty()) {
    EXPECT_TRUE(agreed.ok()) << agreed.to_string();
  } else {
    const std::string lowest = std::to_string(failing.front());
    EXPECT_EQ(agreed.to_string(), "USAGE (64): rank " + lowest + ": no file: r" + lowest);
  }
  expect_reduce(collective, 3);
}

inline void agreed_status_is_ok_when_all_are(Collective& collective) { expect_agreed_status(collective, {}); }

inline void agreed_status_is_that_of_any_single_failing_rank(Collective& collective) {
  for (int r = 0; r < collective.size(); ++r) expect_agreed_status(collective, {r});
}

inline void agreed_status_is_that_of_the_lowest_of_several(Collective& collective) {
  std::vector<int> all;
  for (int r = 0; r < collective.size(); ++r) all.push_back(r);
  expect_agreed_status(collective, all);
  if (collective.size() > 2) expect_agreed_status(collective, {1, collective.size() - 1});
}

inline void agreed_status_keeps_code_and_text(Collective& collective) {
  const int last = collective.size() - 1;
  const std::string text("a: colon, a\nline, a \0 byte", 26);
  const Status mine =
      collective.rank() == last ? Status(StatusCode::kRestartNotAcknowledged, text) : Status();
  const Status agreed = agree_on_status(collective, mine);
  EXPECT_EQ(agreed.code(), StatusCode::kRestartNotAcknowledged);
  EXPECT_EQ(agreed.message(), "rank " + std::to_string(last) + ": " + text);
}

inline const std::vector<Case>& cases() {
#define HOLDFAST_CASE(name) \
  Case { #name, name }
  static const std::vector<Case> all = {
      HOLDFAST_CASE(every_rank_has_its_number),
      HOLDFAST_CASE(reduce_sums_each_lane_and_wraps),
      HOLDFAST_CASE(a_thousand_reduces_keep_their_order),
      HOLDFAST_CASE(gather_of_nothing_is_an_empty_entry_from_each),
      HOLDFAST_CASE(gather_keeps_messages_of_different_lengths_apart),
      HOLDFAST_CASE(gather_from_some_ranks_only),
      HOLDFAST_CASE(gather_keeps_every_byte),
      HOLDFAST_CASE(gather_of_a_mebibyte_from_each),
      HOLDFAST_CASE(broadcast_of_nothing),
      HOLDFAST_CASE(broadcast_keeps_every_byte),
      HOLDFAST_CASE(broadcast_of_four_mebibytes),
      HOLDFAST_CASE(mixed_sequences_never_mix_their_messages),
      HOLDFAST_CASE(agreed_status_is_ok_when_all_are),
      HOLDFAST_CASE(agreed_status_is_that_of_any_single_failing_rank),
      HOLDFAST_CASE(agreed_status_is_that_of_the_lowest_of_several),
      HOLDFAST_CASE(agreed_status_keeps_code_and_text),
  };
#undef HOLDFAST_CASE
  return all;
}

}  // namespace holdfast::conformance
