#include "holdfast/collectives/callback_collective.h"

#include <algorithm>
#include <climits>
#include <cstring>
#include <exception>
#include <map>

#include "holdfast/collectives/topology.h"

namespace holdfast {
namespace {

// FNV-1a, http://www.isthe.com/chongo/tech/comp/fnv/: the same number on every machine.
std::uint64_t number_of_host(const std::string& host) {
  std::uint64_t hash = 14695981039346656037u;
  for (const char c : host) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211u;
  return hash;
}

std::uint64_t values_for(std::uint64_t bytes) { return (bytes + 7) / 8; }

}  // namespace

Status CallbackCollective::create(const holdfast_callbacks& callbacks, std::unique_ptr<Collective>* out) {
  if (callbacks.struct_bytes != sizeof(holdfast_callbacks)) {
    return Status::usage("holdfast_callbacks: struct_bytes is " + std::to_string(callbacks.struct_bytes) +
                         ", and this library's struct has " + std::to_string(sizeof(holdfast_callbacks)) +
                         ": set it to sizeof(holdfast_callbacks), and compile with the library's own header");
  }
  if (callbacks.rank < 0 || callbacks.rank >= callbacks.size) {
    return Status::usage("holdfast_callbacks: there is no rank " + std::to_string(callbacks.rank) +
                         " among " + std::to_string(callbacks.size));
  }
  if (callbacks.all_reduce == nullptr) return Status::usage("holdfast_callbacks: all_reduce is required");
  out->reset(new CallbackCollective(callbacks));
  return Status();
}

CallbackCollective::CallbackCollective(const holdfast_callbacks& callbacks)
    : callbacks_(callbacks),
      node_(callbacks.node != 0 ? callbacks.node : number_of_host(basic_placement(callbacks.rank).host)) {}

Status CallbackCollective::fail(std::string message) {
  failure_ = Status(StatusCode::kRankMissing, std::move(message));
  return failure_;
}

// Exceptions of a caller's C++ function end here: they must not pass through the guard.
template <typename Function>
Status CallbackCollective::call(const char* name, Function&& function) {
  std::string how;
  try {
    const int code = function();
    if (code == 0) return Status();
    how = "returned " + std::to_string(code);
    const char* meaning = callbacks_.describe ? callbacks_.describe(callbacks_.context, code) : nullptr;
    if (meaning != nullptr) how += std::string(": ") + meaning;
  } catch (const std::exception& error) {
    how = std::string("threw: ") + error.what();
  } catch (...) {
    how = "threw an exception of unknown type";
  }
  return fail(std::string(name) + " callback " + how);
}

Status CallbackCollective::all_reduce(std::uint64_t* values, std::size_t count) {
  return call("all_reduce", [&] { return callbacks_.all_reduce(callbacks_.context, values, count); });
}

Status CallbackCollective::reduce(Record& record) {
  if (!failure_.ok()) return failure_;
  Record sum = record;
  if (Status s = all_reduce(sum.lanes().data(), Record::kLanes); !s.ok()) return s;
  record = sum;
  return Status();
}

// Each rank's size and node in lanes of its own. What comes back decides how much memory is taken, so it is
// held against what is known to be right.
Status CallbackCollective::agree_on_sizes(std::uint64_t mine, int most_per_node,
                                          std::vector<std::uint64_t>* sizes) {
  const auto ranks = static_cast<std::size_t>(size());
  const auto me = static_cast<std::size_t>(rank());
  std::vector<std::uint64_t> lanes(2 * ranks);
  lanes[me] = mine;
  lanes[ranks + me] = node_;
  if (Status s = all_reduce(lanes.data(), lanes.size()); !s.ok()) return s;
  if (lanes[me] != mine || lanes[ranks + me] != node_) {
    return fail("all_reduce callback: what rank " + std::to_string(rank()) +
                " gave alone came back as something else, so it does not sum over the ranks");
  }
  std::map<std::uint64_t, int> kept;
  sizes->assign(ranks, 0);
  for (std::size_t r = 0; r < ranks; ++r) {
    if (lanes[r] > INT_MAX) return fail("gather of over 2 GiB from rank " + std::to_string(r));
    if (lanes[r] == 0 || kept[lanes[ranks + r]] >= most_per_node) continue;
    ++kept[lanes[ranks + r]];
    (*sizes)[r] = lanes[r];
  }
  return Status();
}

Status CallbackCollective::gather(const Bytes& mine, std::vector<Bytes>* all, int most_per_node) {
  if (!failure_.ok()) return failure_;
  try {
    std::vector<std::uint64_t> sizes;
    if (Status s = agree_on_sizes(mine.size(), most_per_node, &sizes); !s.ok()) return s;
    std::vector<Bytes> gathered;
    std::vector<void*> places;
    if (rank() == 0) {
      for (const std::uint64_t size : sizes) gathered.emplace_back(size, '\0');
      for (Bytes& bytes : gathered) places.push_back(bytes.data());
    }
    if (std::ranges::any_of(sizes, [](std::uint64_t size) { return size != 0; })) {
      Status s = callbacks_.gather == nullptr ? gather_by_sums(mine, sizes, &gathered) : call("gather", [&] {
        return callbacks_.gather(callbacks_.context, mine.data(), sizes.data(),
                                 rank() == 0 ? places.data() : nullptr);
      });
      if (!s.ok()) return s;
    }
    if (rank() == 0) *all = std::move(gathered);
    return Status();
  } catch (const std::bad_alloc&) {
    return fail("no memory for what is to be gathered");
  }
}

// All messages laid end to end, each from a whole value on: where one rank writes, all others add zeros.
Status CallbackCollective::gather_by_sums(const Bytes& mine, const std::vector<std::uint64_t>& sizes,
                                          std::vector<Bytes>* all) {
  std::vector<std::uint64_t> begins;
  std::uint64_t total = 0;
  for (const std::uint64_t size : sizes) {
    begins.push_back(total);
    total += values_for(size);
  }
  // The part of rank r's message that lies in values [from, to) of the whole, copied by copy(message byte,
  // value byte, bytes).
  const auto overlap = [&](std::size_t r, std::uint64_t from, std::uint64_t to, auto&& copy) {
    const std::uint64_t first = std::max(begins[r], from);
    const std::uint64_t last = std::min(begins[r] + values_for(sizes[r]), to);
    if (first >= last) return;
    const std::uint64_t at = (first - begins[r]) * 8;
    copy(at, (first - from) * 8, std::min((last - first) * 8, sizes[r] - at));
  };
  std::vector<std::uint64_t> chunk;
  for (std::uint64_t from = 0; from < total; from += kChunkValues) {
    const std::uint64_t to = std::min<std::uint64_t>(total, from + kChunkValues);
    chunk.assign(to - from, 0);
    auto* values = reinterpret_cast<char*>(chunk.data());
    overlap(static_cast<std::size_t>(rank()), from, to,
            [&](std::uint64_t byte, std::uint64_t value_byte, std::uint64_t bytes) {
              std::memcpy(values + value_byte, mine.data() + byte, bytes);
            });
    if (Status s = all_reduce(chunk.data(), chunk.size()); !s.ok()) return s;
    for (std::size_t r = 0; r < all->size(); ++r) {
      overlap(r, from, to, [&](std::uint64_t byte, std::uint64_t value_byte, std::uint64_t bytes) {
        std::memcpy((*all)[r].data() + byte, values + value_byte, bytes);
      });
    }
  }
  return Status();
}

Status CallbackCollective::broadcast(Bytes* bytes) {
  if (!failure_.ok()) return failure_;
  std::uint64_t size = rank() == 0 ? bytes->size() : 0;
  if (Status s = all_reduce(&size, 1); !s.ok()) return s;
  if (rank() == 0 && size != bytes->size())
    return fail("all_reduce callback: what rank 0 gave alone came back as something else");
  if (size > INT_MAX) return fail("broadcast of over 2 GiB");
  try {
    Bytes received = rank() == 0 ? *bytes : Bytes(size, '\0');
    if (size != 0) {
      Status s = callbacks_.broadcast == nullptr ? broadcast_by_sums(&received) : call("broadcast", [&] {
        return callbacks_.broadcast(callbacks_.context, received.data(), size);
      });
      if (!s.ok()) return s;
    }
    *bytes = std::move(received);
    return Status();
  } catch (const std::bad_alloc&) {
    return fail("no memory for what is broadcast");
  }
}

Status CallbackCollective::broadcast_by_sums(Bytes* bytes) {
  std::vector<std::uint64_t> chunk;
  for (std::size_t at = 0; at < bytes->size(); at += kChunkValues * 8) {
    const std::size_t part = std::min(bytes->size() - at, kChunkValues * 8);
    chunk.assign(values_for(part), 0);
    if (rank() == 0) std::memcpy(chunk.data(), bytes->data() + at, part);
    if (Status s = all_reduce(chunk.data(), chunk.size()); !s.ok()) return s;
    if (rank() != 0) std::memcpy(bytes->data() + at, chunk.data(), part);
  }
  return Status();
}

}  // namespace holdfast
