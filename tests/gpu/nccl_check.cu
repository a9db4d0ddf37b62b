// On GPUs: the NCCL backend with one rank, a thread, on each GPU that is there, against what the host would
// have got; the whole clean path of an attempt in a CUDA graph; what happens when a rank does not come; how
// long a reduction takes beside NCCL's own. Exit code 0, 1 when a result differs or a call fails, 77 without
// a GPU.
#include <nccl.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "gpu/device_memory.h"
#include "holdfast/collectives/nccl_collective.h"
#include "holdfast/collectives/verdict.h"
#include "holdfast/cuda_attempt.h"
#include "holdfast/record_cuda.h"
#include "holdfast/scan_cuda.h"

namespace holdfast {
namespace {

std::atomic<int> mismatches{0};

void expect(bool same, int rank, const char* what) {
  if (same) return;
  ++mismatches;
  std::printf("MISMATCH: rank %d: %s\n", rank, what);
}

void must_nccl(ncclResult_t code, const char* what) {
  if (code == ncclSuccess) return;
  std::fprintf(stderr, "%s: %s: %s\n", what, ncclGetErrorString(code), ncclGetLastError(nullptr));
  std::exit(1);
}
#define MUST_NCCL(call) ::holdfast::must_nccl(call, #call)

NcclOptions options(std::chrono::milliseconds deadline = std::chrono::minutes(1)) {
  NcclOptions made;
  made.deadline = deadline;
  return made;
}

std::unique_ptr<NcclCollective> connect(const Bytes& id, int rank, int size,
                                        const NcclOptions& how = options()) {
  std::unique_ptr<NcclCollective> made;
  must(NcclCollective::create(id, rank, size, rank, how, &made));
  return made;
}

class Stream {
 public:
  Stream() { MUST(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~Stream() { static_cast<void>(cudaStreamDestroy(stream_)); }
  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

Record contribution(int rank, int round) {
  std::mt19937_64 random(static_cast<std::uint64_t>(rank) * 1000003u + static_cast<std::uint64_t>(round));
  Record record;
  for (std::uint64_t& lane : record.lanes()) lane = random();
  return record;
}

Bytes message(int rank) {
  std::mt19937_64 random(static_cast<std::uint64_t>(rank) + 1);
  Bytes bytes((std::size_t{1} << 20) + 12345 * static_cast<std::size_t>(rank) + 1, '\0');
  for (char& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

void check_collectives(NcclCollective& collective) {
  const int rank = collective.rank();
  const int size = collective.size();
  for (int round = 0; round < 200; ++round) {
    Record record = contribution(rank, round);
    must(collective.reduce(record));
    Record sum;
    for (int r = 0; r < size; ++r) sum += contribution(r, round);
    expect(record == sum, rank, "reduce");
  }
  std::vector<Bytes> all;
  must(collective.gather(message(rank), &all));
  for (int r = 0; r < size && rank == 0; ++r) {
    expect(all[static_cast<std::size_t>(r)] == message(r), rank, "gather");
  }
  must(collective.gather(message(rank), &all, 1));  // they are one node
  for (int r = 0; r < size && rank == 0; ++r) {
    expect(all[static_cast<std::size_t>(r)] == (r == 0 ? message(0) : Bytes()), rank, "gather of one a node");
  }
  Bytes bytes = rank == 0 ? message(9) : "mine";
  must(collective.broadcast(&bytes));
  expect(bytes == message(9), rank, "broadcast");
}

std::uint32_t read_flag(const NcclCollective& collective) {
  std::uint32_t flag = 2;
  MUST(cudaMemcpy(&flag, collective.device_skip_flag(), sizeof(flag), cudaMemcpyDeviceToHost));
  return flag;
}

// Sums in which any number of lanes, mostly none or one, are not as they should be; the same on every rank.
void check_skip_flag(NcclCollective& collective, std::barrier<>& all) {
  const int rank = collective.rank();
  const int size = collective.size();
  const Stream stream;
  const DeviceMemory lanes(sizeof(Record));
  all.arrive_and_wait();
  std::mt19937_64 random(3);
  int clean = 0;
  for (int round = 0; round < 500; ++round) {
    Record mine;
    mine.set_participant(agreement_coefficient(rank, size) * 12345);
    for (std::uint64_t changes = random() % 3; changes > 0; --changes) {
      const auto owner = static_cast<int>(random() % static_cast<std::uint64_t>(size));
      const std::uint64_t lane = random() % Record::kLanes;
      const std::uint64_t value = random() % 2 == 0 ? 1 : random();
      if (owner == rank) mine.lanes()[lane] = value;
    }
    lanes.copy_from(mine.lanes().data(), sizeof(Record));
    must(collective.reduce_on(stream, reinterpret_cast<std::uint64_t*>(lanes.data())));
    Record sum;
    must(collective.wait(&sum));
    Record host = mine;
    must(collective.reduce(host));
    expect(sum == host, rank, "the sum on the stream is that of the host's way");
    expect(read_flag(collective) == (judge(sum, size).clean() ? 0u : 1u), rank, "the skip flag");
    clean += judge(sum, size).clean() ? 1 : 0;
  }
  expect(clean > 50 && clean < 450, rank, "sums of both kinds were tried");
}

// Gradients of several tensors in one memory.
struct Gradients {
#ifdef HOLDFAST_ON_CPU  // where kernels take their time
  static constexpr std::int64_t kTensors = 3;
  static constexpr std::int64_t kEach = 107;
#else
  static constexpr std::int64_t kTensors = 200;
  static constexpr std::int64_t kEach = 10'007;
#endif

  Gradients() : host(kTensors * kEach, 0.5f), device(host.size() * sizeof(float)) {
    for (std::int64_t t = 0; t < kTensors; ++t) {
      const auto* data = reinterpret_cast<const float*>(device.data()) + t * kEach;
      views.push_back(TensorView::contiguous(data, DType::kFloat32, kEach));
    }
    must(CudaScanPlan::create(views, &plan));
  }
  void upload() const { device.copy_from(host.data(), host.size() * sizeof(float)); }

  std::vector<float> host;
  DeviceMemory device;
  std::vector<TensorView> views;
  std::unique_ptr<CudaScanPlan> plan;
};

void check_fill_record(int rank) {
  Gradients gradients;
  std::mt19937_64 random(static_cast<std::uint64_t>(rank));
  const float values[] = {NAN, INFINITY, -INFINITY};
  BadCounts counts;
  for (int i = 0; i < 1000; ++i) {
    float& value = gradients.host[random() % gradients.host.size()];
    const std::uint64_t which = random() % 3;
    if (!std::isfinite(value)) continue;
    value = values[which];
    counts += BadCounts{which == 0 ? 1u : 0u, which == 1 ? 1u : 0u, which == 2 ? 1u : 0u};
  }
  gradients.upload();
  const Stream stream;
  std::unique_ptr<CudaRecord> record;
  must(CudaRecord::create(rank, &record));
  for (const Stage stage : {Stage::kBackward, Stage::kReduction}) {
    record->host() = Record();
    record->host().set_participant(77);
    record->host().add_bad(stage, {3, 0, Record::kMaxPerRank});
    Record wanted = record->host();
    wanted.add_bad(stage, counts);
    if (stage == Stage::kBackward) wanted.mark_bad(rank);
    must(gradients.plan->launch(stream));
    must(record->upload(stream));
    must(record->add(stream, stage, *gradients.plan));
    MUST(cudaStreamSynchronize(stream));
    Record got;
    MUST(cudaMemcpy(got.lanes().data(), record->device_lanes(), sizeof(Record), cudaMemcpyDeviceToHost));
    expect(got == wanted, rank, "the record that was filled on the device");
  }
}

// Scan, record, reduction and flag, captured once; a NaN comes and goes on the last rank.
void check_graph(NcclCollective& collective, std::barrier<>& all) {
  const int rank = collective.rank();
  const int size = collective.size();
  Gradients gradients;
  std::unique_ptr<CudaRecord> record;
  must(CudaRecord::create(rank, &record));
  const Stream stream;
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  MUST(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  must(gradients.plan->launch(stream));
  must(record->upload(stream));
  must(record->add(stream, Stage::kBackward, *gradients.plan));
  must(collective.reduce_on(stream, record->device_lanes()));
  MUST(cudaStreamEndCapture(stream, &graph));
  MUST(cudaGraphInstantiate(&replay, graph, 0));
  all.arrive_and_wait();
  for (int attempt = 0; attempt < 20; ++attempt) {
    const bool bad = attempt % 3 == 1;
    gradients.host[47] = bad && rank == size - 1 ? NAN : 0.5f;
    gradients.upload();
    record->host() = Record();
    record->host().set_participant(agreement_coefficient(rank, size) *
                                   agreement_hash({1, static_cast<std::uint64_t>(attempt), 5}));
    MUST(cudaGraphLaunch(replay, stream));
    Record sum;
    must(collective.wait(&sum));
    const Verdict verdict = judge(sum, size);
    expect(verdict.clean() == !bad, rank, "the verdict of a replay");
    expect(read_flag(collective) == (bad ? 1u : 0u), rank, "the skip flag of a replay");
    if (bad) {
      expect(sum.bad(Stage::kBackward) == BadCounts{1, 0, 0}, rank, "the counts of a replay");
      expect(verdict.only_bad_rank == size - 1, rank, "the bad rank of a replay");
    }
    MUST(cudaStreamSynchronize(stream));  // the next attempt writes what this one read
  }
  MUST(cudaGraphExecDestroy(replay));
  MUST(cudaGraphDestroy(graph));
}

// What is counted on the last rank's device, and what rank 0's host alone knows, keeps an update from running
// on all. Enqueued each time first, then captured once.
void check_attempts(NcclCollective& collective, std::barrier<>& all) {
  const int rank = collective.rank();
  const int size = collective.size();
  Gradients gradients;
  const Stream stream;
  const DeviceMemory seen(sizeof(std::uint32_t));
  std::unique_ptr<CudaAttempt> attempt;
  must(CudaAttempt::create(collective, stream, &attempt));
  std::vector<CudaTensor> tensors;
  for (const TensorView& view : gradients.views) tensors.push_back({std::to_string(tensors.size()), view});
  std::size_t scan = 0;
  must(attempt->add_scan(Stage::kBackward, tensors, &scan));
  attempt->set_update([&](const std::uint32_t* skip_flag) {
    MUST(cudaMemcpyAsync(seen.data(), skip_flag, seen.bytes(), cudaMemcpyDeviceToDevice, stream));
    return Status();
  });
  all.arrive_and_wait();
  const auto make = [&](int round) {
    const bool counted = round % 4 == 1;
    const bool told = round % 4 == 2;
    gradients.host[Gradients::kEach + 11] = counted && rank == size - 1 ? NAN : 0.5f;
    gradients.upload();
    if (round < 8) attempt->scan(scan);
    Record record;
    record.set_participant(agreement_coefficient(rank, size) *
                           agreement_hash({1, static_cast<std::uint64_t>(round), 5}));
    if (told && rank == 0) record.set_error();
    must(attempt->sum(&record));
    must(attempt->update_status());
    const bool clean = judge(record, size).clean();
    expect(clean == !(counted || told), rank, "the verdict of an attempt");
    std::vector<DeviceMeasurement> measured;
    if (!clean) {
      must(attempt->measured(&measured));
      expect(measured.size() == tensors.size(), rank, "how much an attempt measured");
    }
    for (const DeviceMeasurement& one : measured) {
      const bool bad = counted && rank == size - 1 && one.tensor == "1";
      expect(one.probe.first_bad == (bad ? 11 : -1), rank, "what an attempt measured");
    }
    MUST(cudaStreamSynchronize(stream));  // the next attempt writes what this one read
    std::uint32_t flag = 2;
    MUST(cudaMemcpy(&flag, seen.data(), sizeof(flag), cudaMemcpyDeviceToHost));
    expect(flag == (clean ? 0u : 1u), rank, "the flag that the update saw");
  };
  for (int round = 0; round < 8; ++round) make(round);
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  MUST(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  attempt->scan(scan);
  must(attempt->enqueue());
  MUST(cudaStreamEndCapture(stream, &graph));
  MUST(cudaGraphInstantiate(&replay, graph, 0));
  attempt->replay([&] {
    return cudaGraphLaunch(replay, stream) == cudaSuccess ? Status() : Status::internal("cudaGraphLaunch");
  });
  all.arrive_and_wait();
  for (int round = 8; round < 16; ++round) make(round);
  MUST(cudaGraphExecDestroy(replay));
  MUST(cudaGraphDestroy(graph));
}

void check_missing_peer(const Bytes& id, int rank, int size, std::barrier<>& all) {
  auto collective = connect(id, rank, size, options(std::chrono::seconds(5)));
  if (rank != size - 1) {
    Record record;
    const auto start = std::chrono::steady_clock::now();
    const Status status = collective->reduce(record);
    const auto took = std::chrono::steady_clock::now() - start;
    expect(status.code() == StatusCode::kRankMissing, rank, "a rank that does not come is missed");
    expect(took < std::chrono::seconds(15), rank, "and soon");
    if (rank == 0) std::printf("a rank does not come: %s\n", status.to_string().c_str());
  }
  all.arrive_and_wait();
  const auto start = std::chrono::steady_clock::now();
  collective.reset();
  expect(std::chrono::steady_clock::now() - start < std::chrono::seconds(15), rank, "the end does not hang");
}

template <class Enqueue>
double microseconds_on(cudaStream_t stream, Enqueue enqueue) {
  constexpr int kRounds = 2000;
  cudaEvent_t begin;
  cudaEvent_t end;
  MUST(cudaEventCreate(&begin));
  MUST(cudaEventCreate(&end));
  for (int i = 0; i < 200; ++i) enqueue();
  MUST(cudaEventRecord(begin, stream));
  for (int i = 0; i < kRounds; ++i) enqueue();
  MUST(cudaEventRecord(end, stream));
  MUST(cudaEventSynchronize(end));
  float milliseconds = 0;
  MUST(cudaEventElapsedTime(&milliseconds, begin, end));
  MUST(cudaEventDestroy(begin));
  MUST(cudaEventDestroy(end));
  return static_cast<double>(milliseconds) * 1000 / kRounds;
}

// Over the trainer's communicator, and one that is split from it.
void measure(const Bytes& id, int rank, int size) {
  ncclUniqueId theirs;
  std::memcpy(theirs.internal, id.data(), sizeof(theirs.internal));
  ncclComm_t bare = nullptr;
  MUST_NCCL(ncclCommInitRank(&bare, size, theirs, rank));
  std::unique_ptr<NcclCollective> collective;
  must(NcclCollective::create(bare, options(), &collective));
  const Stream stream;
  const DeviceMemory lanes(sizeof(Record));
  MUST(cudaMemset(lanes.data(), 0, lanes.bytes()));
  auto* record = reinterpret_cast<std::uint64_t*>(lanes.data());
  const double theirs_us = microseconds_on(stream, [&] {
    MUST_NCCL(ncclAllReduce(record, record, Record::kLanes, ncclUint64, ncclSum, bare, stream));
  });
  const double ours_us = microseconds_on(stream, [&] { must(collective->reduce_on(stream, record)); });
  constexpr int kRounds = 1000;
  Record host;
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < kRounds; ++i) must(collective->reduce(host));
  const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
  if (rank == 0) {
    std::printf("\n256 bytes on %d GPU%s                     us   of ncclAllReduce\n", size,
                size == 1 ? "" : "s");
    std::printf("ncclAllReduce on a stream        %9.2f             1.00\n", theirs_us);
    std::printf("reduce_on, with the skip flag    %9.2f           %6.2f\n", ours_us, ours_us / theirs_us);
    const double host_us = took.count() / kRounds;
    std::printf("reduce, from and to the host     %9.2f           %6.2f\n\n", host_us, host_us / theirs_us);
  }
  collective.reset();
  MUST_NCCL(ncclCommDestroy(bare));
}

// Memory is allocated while no collective is under way: with the GPUs of one process it may wait for all.
void check_rank(const std::vector<Bytes>& ids, int rank, int size, bool with_speed, std::barrier<>& all) {
  MUST(cudaSetDevice(rank));
  {
    const auto collective = connect(ids[0], rank, size);
    check_collectives(*collective);
    all.arrive_and_wait();
    check_skip_flag(*collective, all);
    all.arrive_and_wait();
    check_fill_record(rank);
    check_graph(*collective, all);
    all.arrive_and_wait();
    check_attempts(*collective, all);
    all.arrive_and_wait();
  }
  all.arrive_and_wait();
  if (rank == 0)
    std::printf("collectives, skip flag, filled record, graph, attempts: checked on %d GPUs\n", size);
  if (size > 1) check_missing_peer(ids[1], rank, size, all);
  if (size == 1) std::printf("a rank that does not come: not run, there is one GPU\n");
  if (with_speed) measure(ids[2], rank, size);
}

int run(bool with_speed) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("not run: no GPU\n");
    return 77;
  }
  std::vector<Bytes> ids(3);
  for (Bytes& id : ids) must(NcclCollective::make_id(&id));
  std::barrier<> all(devices);
  {
    std::vector<std::jthread> threads;
    for (int r = 0; r < devices; ++r) {
      threads.emplace_back([&, r] { check_rank(ids, r, devices, with_speed, all); });
    }
  }
  std::printf(mismatches == 0 ? "all results agree\n" : "%d MISMATCHES\n", mismatches.load());
  return mismatches == 0 ? 0 : 1;
}

}  // namespace
}  // namespace holdfast

int main(int argc, char** argv) { return holdfast::run(argc < 2 || std::string(argv[1]) != "--no-speed"); }
