// The verdict on more ranks than a machine has: the guard and its MPI backend as they are, over a network
// that SimGrid simulates. All ranks run in one process, in turns; times are the simulated network's.
//
//   bench/simulate.sh runs it
//
// Prints what simulate.sh makes its table of, and checks every result: exit status 1 when one is wrong. What
// rank 0 computes on the bad path is this machine's processor time, and told apart: rank0_us.
#include <fmt/format.h>
#include <mpi.h>
#include <simgrid/actor.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <ctime>
#include <memory>
#include <string>
#include <vector>

#include "bad_attempts.h"
#include "holdfast/collectives/mpi_collective.h"

// SMPI always says that it has no threads. The guard asks on behalf of its watchdog, which does not run here.
extern "C" int MPI_Query_thread(int* provided) {
  *provided = MPI_THREAD_FUNNELED;
  return MPI_SUCCESS;
}

namespace {

using namespace holdfast;

void require(bool good, const std::string& what) {
  if (good) return;
  fmt::print(stderr, "simulate_verdict: {}\n", what);
  std::exit(1);
}
void require(const Status& status) { require(status.ok(), status.to_string()); }

// The MPI backend, with a note of what passes through it.
class NotedCollective final : public Collective {
 public:
  explicit NotedCollective(std::unique_ptr<Collective> inner) : inner_(std::move(inner)) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  Status reduce(Record& record) override {
    ++collectives;
    return inner_->reduce(record);
  }
  using Collective::gather;
  Status gather(const Bytes& mine, std::vector<Bytes>* all, int most_per_node) override {
    ++collectives;
    report_bytes = mine.size();
    cap = most_per_node;
    Status status = inner_->gather(mine, all, most_per_node);
    gathered_us_ = processor_us();
    return status;
  }
  Status broadcast(Bytes* bytes) override {
    ++collectives;
    // No other rank runs between a gather and a broadcast of this one: what has passed was this rank's work.
    thought_us = processor_us() - gathered_us_;
    return inner_->broadcast(bytes);
  }
  GatherTraffic traffic() const { return dynamic_cast<const MpiCollective&>(*inner_).gather_traffic(); }

  int collectives = 0;
  std::size_t report_bytes = 0;  // of this rank, in the last gather
  int cap = 0;                   // of the last gather
  double thought_us = 0;         // between the last gather and the last broadcast, in processor time

 private:
  // Of the thread that all ranks share; the machine may be busy with other things.
  static double processor_us() {
    timespec now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) * 1e6 + static_cast<double>(now.tv_nsec) * 1e-3;
  }

  const std::unique_ptr<Collective> inner_;
  double gathered_us_ = 0;
};

class Simulation {
 public:
  explicit Simulation(double local_ns) : local_seconds_(local_ns * 1e-9) {
    std::unique_ptr<Collective> mpi;
    require(MpiCollective::create(MPI_COMM_WORLD, &mpi));
    collective_ = std::make_unique<NotedCollective>(std::move(mpi));
    rank_ = collective_->rank();
    ranks_ = collective_->size();
    MPI_Comm_dup(MPI_COMM_WORLD, &bare_);
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, rank_, MPI_INFO_NULL, &node_);
    require(bench::make_guard(*collective_, &guard_));
  }

  void run() {
    const int nodes = sum_over_ranks(node_rank() == 0 ? 1 : 0);
    const double bare = time_bare();
    const double again = time_bare();
    const double clean = time_attempt(0);
    if (rank_ == 0) {
      fmt::print(
          "clean ranks={} nodes={} allreduce_us={:.3f} verdict_us={:.3f} ratio={:.4f} control={:.4f}\n",
          ranks_, nodes, bare * 1e6, clean * 1e6, clean / bare, again / bare);
    }
    std::vector<int> numbers = {1, (ranks_ + 99) / 100, ranks_ / 4, ranks_};
    numbers.erase(std::unique(numbers.begin(), numbers.end()), numbers.end());
    for (const int bad : numbers) bad_path(bad, clean);
    require(guard_->close().apply(), "the end of the run was refused");
  }

 private:
  int node_rank() const {
    int rank = 0;
    MPI_Comm_rank(node_, &rank);
    return rank;
  }

  static long sum_over(MPI_Comm communicator, long value) {
    MPI_Allreduce(MPI_IN_PLACE, &value, 1, MPI_LONG, MPI_SUM, communicator);
    return value;
  }
  static int sum_over_ranks(int value) { return static_cast<int>(sum_over(MPI_COMM_WORLD, value)); }

  // All ranks begin at the same simulated moment; the time is that of the last one to end.
  template <typename Call>
  double time(Call&& call) {
    double begin = MPI_Wtime();
    MPI_Allreduce(MPI_IN_PLACE, &begin, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    begin += 1e-3;
    sg_actor_sleep_until(begin);
    call();
    double seconds = MPI_Wtime() - begin;
    MPI_Allreduce(MPI_IN_PLACE, &seconds, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    return seconds;
  }

  double time_bare() {
    std::array<std::uint64_t, Record::kLanes> lanes;
    lanes.fill(static_cast<std::uint64_t>(rank_) + 1);
    const double seconds = time([&] {
      MPI_Allreduce(MPI_IN_PLACE, lanes.data(), static_cast<int>(lanes.size()), MPI_UINT64_T, MPI_SUM, bare_);
    });
    const auto triangle = static_cast<std::uint64_t>(ranks_) * static_cast<std::uint64_t>(ranks_ + 1) / 2;
    for (const std::uint64_t lane : lanes) require(lane == triangle, "a sum is wrong");
    return seconds;
  }

  // A whole attempt in which nothing is observed but what makes `bad` ranks bad.
  double time_attempt(int bad) {
    const bool is_bad = bench::is_bad(rank_, ranks_, bad);
    const std::uint64_t updates = guard_->updates();
    const std::uint64_t skips = guard_->skips();
    const int collectives = collective_->collectives;
    Decision decision;
    const double seconds = time([&] {
      sg_actor_sleep_for(local_seconds_);
      bench::begin_attempt(*guard_, is_bad);
      decision = guard_->decide();
      guard_->finish();
    });
    const auto say = [&] {
      return fmt::format("{} of {} ranks are bad, and rank {} gets {} {}", bad, ranks_, rank_,
                         action_name(decision.action), decision.reason);
    };
    require(decision.action == (bad > 0 ? Action::kSkip : Action::kApply), say());
    require(guard_->updates() - updates == (bad > 0 ? 0u : 1u), "updates are miscounted");
    require(guard_->skips() - skips == (bad > 0 ? 1u : 0u), "skips are miscounted");
    require(collective_->collectives - collectives == (bad > 0 ? 3 : 1), "more collectives than promised");
    check_same_reason(decision.reason);
    return seconds;
  }

  void check_same_reason(std::string reason) {
    const std::string mine = reason;
    reason.resize(4096);
    MPI_Bcast(reason.data(), static_cast<int>(reason.size()), MPI_CHAR, 0, MPI_COMM_WORLD);
    require(mine == reason.c_str(), "ranks were given different reasons");
  }

  // What rank 0 has to be told by other nodes: of each the first reports, up to the cap.
  GatherTraffic due() {
    int size = 0;
    MPI_Comm_size(node_, &size);
    const long mine = static_cast<long>(collective_->report_bytes);
    std::vector<long> reports(static_cast<std::size_t>(size));
    MPI_Allgather(&mine, 1, MPI_LONG, reports.data(), 1, MPI_LONG, node_);
    constexpr long kEnvelope = 8;  // the rank and the length
    long bytes = 0;
    int kept = 0;
    for (const long report : reports) {
      if (report == 0 || kept == collective_->cap) continue;
      bytes += report + kEnvelope;
      ++kept;
    }
    const bool speaks = node_rank() == 0 && rank_ != 0 && kept > 0;
    return {static_cast<std::uint64_t>(sum_over(MPI_COMM_WORLD, speaks ? 1 : 0)),
            static_cast<std::uint64_t>(sum_over(MPI_COMM_WORLD, speaks ? bytes : 0))};
  }

  void bad_path(int bad, double clean) {
    const GatherTraffic before = collective_->traffic();
    const double seconds = time_attempt(bad);
    const GatherTraffic after = collective_->traffic();
    const GatherTraffic expected = due();
    if (rank_ != 0) return;
    const std::uint64_t messages = after.messages - before.messages;
    const std::uint64_t bytes = after.bytes - before.bytes;
    require(messages == expected.messages && bytes == expected.bytes,
            fmt::format("rank 0 received {} messages with {} bytes; due were {} with {}", messages, bytes,
                        expected.messages, expected.bytes));
    require(messages <= static_cast<std::uint64_t>(bad), "messages grow faster than bad ranks");
    fmt::print(
        "badpath ranks={} bad={} network_us={:.1f} rank0_us={:.1f} us={:.1f} clean_us={:.1f} messages={} "
        "bytes={}\n",
        ranks_, bad, seconds * 1e6, collective_->thought_us, seconds * 1e6 + collective_->thought_us,
        clean * 1e6, messages, bytes);
  }

  const double local_seconds_;
  std::unique_ptr<NotedCollective> collective_;
  std::unique_ptr<StepGuard> guard_;
  MPI_Comm bare_ = MPI_COMM_NULL;
  MPI_Comm node_ = MPI_COMM_NULL;
  int rank_ = 0;
  int ranks_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &provided);
  {
    const double local_ns = argc == 2 ? std::atof(argv[1]) : 0;
    require(local_ns > 0,
            "usage: simulate_verdict LOCAL_NS, what an attempt costs a rank beside its collective");
    Simulation(local_ns).run();
  }
  MPI_Finalize();
  return 0;
}
