#include "collectives/stand_in_world.h"

#include <algorithm>
#include <cstdlib>

#include "holdfast/collectives/record.h"

namespace holdfast::stand_in {

void World::free_memory() {
  for (const auto& [data, allocation] : memory) std::free(data);
  memory.clear();
}

World& world() {
  static World one;
  return one;
}

thread_local int current_device = -1;

void complain(const std::string& what) { world().misuse.push_back(what); }

std::optional<Kind> enter(Lock& lock, const char* function, int rank) {
  World& w = world();
  const int number = ++w.calls[rank][function];
  const auto fault = std::ranges::find_if(
      w.faults, [&](const Fault& f) { return f.function == function && f.rank == rank && f.call == number; });
  if (fault == w.faults.end()) return std::nullopt;
  const Kind kind = fault->kind;
  if (kind == Kind::kNeverReturns || kind == Kind::kDwells) {
    ++w.held_back;
    w.changed.wait(lock, [&] { return w.released; });
    --w.held_back;
  }
  return kind == Kind::kDwells ? std::nullopt : std::optional(kind);
}

bool inside(const void* data, std::size_t bytes, bool pinned) {
  const auto* at = static_cast<const std::byte*>(data);
  for (const auto& [begin, allocation] : world().memory) {
    if (at >= begin && at + bytes <= begin + allocation.bytes) return allocation.pinned == pinned;
  }
  return false;
}

bool usable(cudaStream_t stream, const char* function) {
  for (const auto& communicator : world().communicators) {
    if (!communicator->ended && communicator->pending && communicator->pending_stream == stream) {
      complain(std::string(function) + " behind a collective that is still to be enqueued");
    }
  }
  if (stream->destroyed) complain(std::string(function) + " on a stream that was destroyed");
  if (stream->device != current_device) complain(std::string(function) + " with another device current");
  return !stream->destroyed;
}

void pump() {
  for (bool moved = true; moved;) {
    moved = false;
    for (const auto& stream : world().streams) {
      while (!stream->work.empty() && stream->work.front()()) {
        stream->work.pop_front();
        moved = true;
      }
    }
  }
}

ncclComm_t add_communicator(std::shared_ptr<Clique> clique, int rank) {
  world().communicators.push_back(std::make_unique<ncclComm>());
  ncclComm_t made = world().communicators.back().get();
  made->clique = std::move(clique);
  made->rank = rank;
  return made;
}

// ---- for tests

void reset() {
  World& w = world();
  Lock lock(w.mutex);
  w.free_memory();
  w.faults.clear();
  w.calls.clear();
  w.streams.clear();
  w.communicators.clear();
  w.cliques.clear();
  w.misuse.clear();
  w.callers_streams.clear();
  w.late = 0;
  w.released = false;
}

void inject(const Fault& fault) {
  Lock lock(world().mutex);
  world().faults.push_back(fault);
}

void answer_late(int polls) {
  Lock lock(world().mutex);
  world().late = polls;
}

void release() {
  Lock lock(world().mutex);
  world().released = true;
  world().changed.notify_all();
}

int held_back() {
  Lock lock(world().mutex);
  return world().held_back;
}

std::map<std::string, int> calls(int rank) {
  Lock lock(world().mutex);
  return world().calls[rank];
}

int calls(int rank, const std::string& function) { return calls(rank)[function]; }

std::size_t held() {
  World& w = world();
  Lock lock(w.mutex);
  std::size_t count = 0;
  for (const auto& [data, allocation] : w.memory) count += allocation.owner < 0 ? 1 : 0;
  for (const auto& communicator : w.communicators)
    count += communicator->ended || communicator->callers ? 0 : 1;
  for (const auto& stream : w.streams) {
    const bool ours = std::ranges::find(w.callers_streams, stream.get()) == w.callers_streams.end();
    count += ours && !stream->destroyed ? 1 : 0;
  }
  return count;
}

std::vector<std::string> misuse() {
  Lock lock(world().mutex);
  return world().misuse;
}

cudaStream_t make_stream(int device) {
  World& w = world();
  Lock lock(w.mutex);
  w.streams.push_back(std::make_unique<CUstream_st>());
  w.streams.back()->device = device;
  w.callers_streams.push_back(w.streams.back().get());
  return w.streams.back().get();
}

std::uint64_t* make_lanes(int device) {
  Lock lock(world().mutex);
  auto* data = static_cast<std::byte*>(std::calloc(1, sizeof(Record)));
  world().memory[data] = {sizeof(Record), false, device};
  return reinterpret_cast<std::uint64_t*>(data);
}

ncclComm* make_communicator(const std::string& name, int rank, int size) {
  Lock lock(world().mutex);
  auto& clique = world().cliques[name];
  if (!clique) clique = std::make_shared<Clique>();
  clique->size = size;
  clique->arrived.insert(rank);
  ncclComm* made = add_communicator(clique, rank);
  made->callers = true;
  return made;
}

void drain() {
  Lock lock(world().mutex);
  pump();
}

}  // namespace holdfast::stand_in
