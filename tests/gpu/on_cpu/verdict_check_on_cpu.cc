// The kernels between the scan and the optimizer as they are, compiled for the CPU by the header beside this
// file: the record that is filled from a scan's results, the skip flag and the sum for the host. Exit code 0,
// or 1 when a result differs.
#include "gpu/on_cpu/cuda_runtime.h"

#include "cuda/record_cuda.cu"
#include "cuda/scan_cuda.cu"
#include "nccl_verdict.cu"

#include <limits>

#include "gpu/device_memory.h"
#include "holdfast/collectives/verdict.h"

std::function<void()> bind_kernel(const void* kernel, void** arguments) {
  using namespace holdfast;
  using namespace holdfast::cuda;
  const auto argument = [&]<class T>(int i, T*) { return *static_cast<const T*>(arguments[i]); };
#define ARGUMENT(i, type) argument(i, static_cast<type*>(nullptr))
  if (kernel == reinterpret_cast<const void*>(scan_tiles)) {
    return [tables = ARGUMENT(0, Tables)] { scan_tiles(tables); };
  }
  if (kernel == reinterpret_cast<const void*>(fill_record)) {
    return [probes = ARGUMENT(0, const CudaProbe*), count = ARGUMENT(1, std::size_t),
            stage = ARGUMENT(2, Stage), rank = ARGUMENT(3, int),
            lanes = ARGUMENT(4, std::uint64_t*)] { fill_record(probes, count, stage, rank, lanes); };
  }
  return [sum = ARGUMENT(0, const std::uint64_t*), size = ARGUMENT(1, std::uint64_t),
          verdict = ARGUMENT(2, DeviceVerdict*),
          board = ARGUMENT(3, SumBoard*)] { publish(sum, size, verdict, board); };
}

namespace holdfast {
namespace {

int mismatches = 0;

void expect(bool same, const char* what) {
  if (same) return;
  ++mismatches;
  std::printf("MISMATCH: %s\n", what);
}

void check_filled_record(std::mt19937_64& random, std::size_t tensors) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  std::vector<std::vector<float>> data(tensors);
  std::vector<TensorView> views;
  BadCounts counts;
  for (auto& tensor : data) {
    tensor.assign(1 + random() % 40, 1.0f);
    for (float& value : tensor) {
      const std::uint64_t which = random() % 200;
      if (which > 2) continue;
      value = which == 0 ? kInf - kInf : which == 1 ? kInf : -kInf;
      counts += BadCounts{which == 0 ? 1u : 0u, which == 1 ? 1u : 0u, which == 2 ? 1u : 0u};
    }
    views.push_back(TensorView::of(tensor));
  }
  std::unique_ptr<CudaScanPlan> plan;
  std::unique_ptr<CudaRecord> record;
  must(CudaScanPlan::create(views, &plan));
  must(CudaRecord::create(6, &record));
  must(plan->launch(nullptr));
  for (int s = 0; s < kStageCount; ++s) {
    const auto stage = static_cast<Stage>(s);
    record->host() = Record();
    record->host().set_participant(77);
    record->host().add_bad(stage, {3, 0, Record::kMaxPerRank});
    Record wanted = record->host();
    wanted.add_bad(stage, counts);
    if (stage < Stage::kReduction && counts.total() != 0) wanted.mark_bad(6);
    must(record->upload(nullptr));
    must(record->add(nullptr, stage, *plan));
    Record got;
    std::memcpy(got.lanes().data(), record->device_lanes(), sizeof(Record));
    expect(got == wanted, "the record that is filled from the scan's results");
  }
}

void check_verdicts(std::mt19937_64& random) {
  cuda::SumBoard board = {};
  cuda::DeviceVerdict verdict = {0, 1};
  for (std::uint64_t round = 0; round < 3000; ++round) {
    const int size = 1 + static_cast<int>(random() % 3);
    Record sum;
    sum.lanes()[Record::kParticipantsLane] = static_cast<std::uint64_t>(size);
    for (std::uint64_t changes = random() % 3; changes > 0; --changes) {
      sum.lanes()[random() % Record::kLanes] = random() % 2 == 0 ? 1 : random();
    }
    board.lost = round > 2500 ? 1 : 0;
    expect(cuda::launch_publish(sum.lanes().data(), static_cast<std::uint64_t>(size), &verdict, &board,
                                nullptr) == cudaSuccess,
           "the launch");
    const bool clean = judge(sum, size).clean() && board.lost == 0;
    expect(verdict.skip == (clean ? 0u : 1u), "the skip flag");
    expect(board.sums == round + 1 && verdict.sums == round + 1, "how many sums there were");
    expect(std::memcmp(board.lanes[round % cuda::SumBoard::kSlots], sum.lanes().data(), sizeof(Record)) == 0,
           "the sum for the host");
  }
}

}  // namespace
}  // namespace holdfast

int main() {
  std::mt19937_64 random(17);
  for (const std::size_t tensors : {0, 1, 3, 255, 256, 257, 1000})
    holdfast::check_filled_record(random, tensors);
  holdfast::check_verdicts(random);
  std::printf(holdfast::mismatches == 0 ? "all results agree\n" : "%d MISMATCHES\n", holdfast::mismatches);
  return holdfast::mismatches == 0 ? 0 : 1;
}
