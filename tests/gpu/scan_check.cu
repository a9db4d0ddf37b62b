// On a GPU: the scan has the CPU's bits, also in a CUDA graph, and its speed beside the device's own. Exit
// code 0, 1 when a result differs or a call fails, 77 without a GPU.
#include <cstdio>
#include <random>
#include <vector>

#include "gpu/device_memory.h"
#include "gpu/reference.h"
#include "gpu/scan_speed.h"
#include "holdfast/scan_cuda.h"
#include "ranks/scan_patterns.h"

namespace holdfast {
namespace {

int mismatches = 0;

void expect(bool same, const char* what) {
  if (same) return;
  ++mismatches;
  std::printf("MISMATCH: %s\n", what);
}

void expect_same(const CudaProbe& device, const Probe& host, const TensorView& view, const char* what) {
  const auto got = bits_of(to_probe(device));
  const auto wanted = bits_of(host);
  if (got == wanted) return;
  if (++mismatches > 20) return;
  std::printf("MISMATCH: %s, %s, %lld elements, address %% 16 = %d\n", what,
              std::string(dtype_name(view.dtype)).c_str(), static_cast<long long>(view.element_count),
              static_cast<int>(reinterpret_cast<std::uintptr_t>(view.data) % 16));
  const char* names[] = {"count",   "nan",   "pos_inf", "neg_inf", "first_bad",
                         "abs_max", "small", "medium",  "large"};
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (got[i] != wanted[i]) {
      std::printf("  %s: %016llx, not %016llx\n", names[i], static_cast<unsigned long long>(got[i]),
                  static_cast<unsigned long long>(wanted[i]));
    }
  }
}

std::uint32_t read_flag(const CudaScanPlan& plan) {
  std::uint32_t flag = 0;
  MUST(cudaMemcpy(&flag, plan.device_skip_flag(), sizeof(flag), cudaMemcpyDeviceToHost));
  return flag;
}

// Tensors that lie one behind the other in one memory, here and on the device.
struct Tensors {
  Memory memory;
  std::vector<std::pair<std::size_t, TensorView>> parts;  // offset; data is not set

  void add(DType dtype, std::int64_t count, const Memory& contents, std::size_t misalignment) {
    const std::size_t at = (memory.size() + 15) / 16 * 16 + misalignment;
    memory.resize(at + contents.size());
    std::memcpy(memory.data() + at, contents.data(), contents.size());
    parts.emplace_back(at, TensorView::contiguous(nullptr, dtype, count));
  }
  std::vector<TensorView> at(const std::byte* base) const {
    std::vector<TensorView> views;
    for (const auto& [offset, view] : parts) {
      views.push_back(TensorView::contiguous(base + offset, view.dtype, view.element_count));
    }
    return views;
  }
};

bool is_complex(DType dtype) { return dtype == DType::kComplex64 || dtype == DType::kComplex128; }

// Sizes around those of a row, a block, a chunk, a tile and the strands, in values of several kinds.
Tensors make_tensors(std::mt19937_64& random, bool brief) {
  Tensors tensors;
  for (const DType dtype : float_dtypes()) {
    const auto width = static_cast<std::size_t>(dtype_size(dtype));
    const std::size_t part = is_complex(dtype) ? width / 2 : width;
    const std::int64_t tile = 128 * 1024 / static_cast<std::int64_t>(width);  // 1, 2 or 4 chunks of 8 blocks
    const std::int64_t counts[] = {
        0,        1,    63,       65,           tile / 32 + 1, tile / 16 - 1, tile / 8, tile / 4 + 1,
        tile - 1, tile, tile + 1, 3 * tile - 5, 9 * tile + 3,  32 * tile + 7, 70 * tile};
    for (const std::int64_t count : counts) {
      if (brief && count > 10 * tile) continue;
      const std::size_t bytes = static_cast<std::size_t>(count) * width;
      tensors.add(dtype, count, random_memory(bytes, dtype, random, true), count % 3 == 0 ? part : 0);
      if (count > 4 * tile) continue;
      tensors.add(dtype, count, random_memory(bytes, dtype, random, false), count % 3 == 1 ? part : 0);
      tensors.add(dtype, count, Memory(bytes), 0);
      tensors.add(dtype, count, Memory(bytes, std::byte{0xff}), 0);
      for (const int exponent : {-140, -52, -49, 60, 120}) {
        const bool wide = dtype == DType::kFloat64 || dtype == DType::kComplex128;
        Memory memory = random_memory(bytes, dtype, random, true, wide ? 8 * exponent : exponent);
        const Bad bad = patterns_of(dtype);
        if (count > 0 && exponent % 2 == 0) {
          for (const std::uint64_t pattern : {bad.nan, bad.pos_inf, bad.neg_inf, bad.largest}) {
            put(memory, random() % (bytes / part), pattern, dtype, width);
          }
        }
        tensors.add(dtype, count, memory, exponent == 60 ? part : 0);
      }
    }
  }
  tensors.add(DType::kInt32, 5, Memory(20, std::byte{0xff}), 0);
  return tensors;
}

void check_values(std::mt19937_64& random, bool brief) {
  const Tensors tensors = make_tensors(random, brief);
  const DeviceMemory device(tensors.memory.size());
  device.copy_from(tensors.memory.data(), tensors.memory.size());
  const std::vector<TensorView> views = tensors.at(device.data());
  const std::vector<Probe> wanted = reference(tensors.at(tensors.memory.data()));

  std::unique_ptr<CudaScanPlan> plan;
  must(CudaScanPlan::create(views, &plan));
  PinnedArray<CudaProbe> results(views.size());
  const int rounds = brief ? 1 : 3;
  for (int round = 0; round < rounds; ++round) {
    must(plan->launch(nullptr));
    must(plan->copy_results(nullptr, {results.data(), results.size()}));
    MUST(cudaDeviceSynchronize());
    for (std::size_t i = 0; i < views.size(); ++i) expect_same(results[i], wanted[i], views[i], "values");
    expect(read_flag(*plan) == 1, "the skip flag is 1");
  }
  std::printf("values: %zu tensors, %.0f MB, launches: %d, compared with %s\n", views.size(),
              static_cast<double>(tensors.memory.size()) / 1e6, rounds, reference_name());
}

// The same launch, captured once and replayed over memory that changes in between.
void check_graph(std::mt19937_64& random) {
  Tensors tensors;
  for (int i = 0; i < 100; ++i) {
    const DType dtype = float_dtypes()[static_cast<std::size_t>(i) % float_dtypes().size()];
    const auto count = static_cast<std::int64_t>(1000 + random() % 20000);
    tensors.add(dtype, count,
                random_memory(static_cast<std::size_t>(count * dtype_size(dtype)), dtype, random, true), 0);
  }
  const DeviceMemory device(tensors.memory.size());
  const std::vector<TensorView> views = tensors.at(device.data());
  std::unique_ptr<CudaScanPlan> plan;
  must(CudaScanPlan::create(views, &plan));
  PinnedArray<CudaProbe> results(views.size());

  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  MUST(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  MUST(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  must(plan->launch(stream));
  must(plan->copy_results(stream, {results.data(), results.size()}));
  MUST(cudaStreamEndCapture(stream, &graph));
  MUST(cudaGraphInstantiate(&replay, graph, 0));

  const std::size_t at = tensors.parts[41].first + 4 * 777;  // an fp32
  const std::uint32_t nan = 0x7fc00000;
  const Memory clean = tensors.memory;
  for (const std::uint32_t bad : {0u, 1u, 0u}) {
    tensors.memory = clean;
    if (bad == 1) std::memcpy(tensors.memory.data() + at, &nan, sizeof(nan));
    device.copy_from(tensors.memory.data(), tensors.memory.size());
    MUST(cudaDeviceSynchronize());
    MUST(cudaGraphLaunch(replay, stream));
    MUST(cudaStreamSynchronize(stream));
    const std::vector<Probe> wanted = reference(tensors.at(tensors.memory.data()));
    for (std::size_t i = 0; i < views.size(); ++i) expect_same(results[i], wanted[i], views[i], "graph");
    expect(read_flag(*plan) == bad, "the skip flag follows the replay");
  }
  MUST(cudaGraphExecDestroy(replay));
  MUST(cudaGraphDestroy(graph));
  MUST(cudaStreamDestroy(stream));
  std::printf("graph: captured once, replayed three times\n");
}

void check_more_than_32_bits_of_elements() {
  const std::int64_t count = (std::int64_t{1} << 32) + 5;
  std::size_t free = 0;
  std::size_t total = 0;
  MUST(cudaMemGetInfo(&free, &total));
  if (free < static_cast<std::size_t>(count) + (std::size_t{1} << 30)) {
    std::printf("2^32 + 5 elements: not run, the device has too little memory\n");
    return;
  }
  const DeviceMemory device(static_cast<std::size_t>(count));
  MUST(cudaMemset(device.data(), 0, device.bytes()));
  const unsigned char last[] = {0x3c, 0xfc};  // 1 and -Inf
  MUST(cudaMemcpy(device.data() + count - 2, last, 2, cudaMemcpyHostToDevice));
  const TensorView view = TensorView::contiguous(device.data(), DType::kFloat8E5M2, count);
  std::unique_ptr<CudaScanPlan> plan;
  must(CudaScanPlan::create({&view, 1}, &plan));
  PinnedArray<CudaProbe> result(1);
  must(plan->launch(nullptr));
  must(plan->copy_results(nullptr, {result.data(), 1}));
  MUST(cudaDeviceSynchronize());
  Probe wanted;
  wanted.count = static_cast<std::uint64_t>(count);
  wanted.bad.neg_inf = 1;
  wanted.first_bad = count - 1;
  wanted.abs_max = 1;
  wanted.squares.medium = 1;
  expect_same(result[0], wanted, view, "2^32 + 5 elements");
  std::printf("2^32 + 5 elements: scanned to the end\n");
}

int run(bool with_speed, bool brief) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("not run: no GPU\n");
    return 77;
  }
  cudaDeviceProp device;
  MUST(cudaGetDeviceProperties(&device, 0));
  const unsigned seed = std::random_device()();
  std::printf("%s, compute capability %d.%d, seed %u\n", device.name, device.major, device.minor, seed);
  std::mt19937_64 random(seed);
  check_values(random, brief);
  check_graph(random);
  check_more_than_32_bits_of_elements();
  if (with_speed && !measure_speed()) ++mismatches;
  std::printf(mismatches == 0 ? "all results agree\n" : "%d MISMATCHES\n", mismatches);
  return mismatches == 0 ? 0 : 1;
}

}  // namespace
}  // namespace holdfast

int main(int argc, char** argv) {
  const std::string option = argc > 1 ? argv[1] : "";
  return holdfast::run(option.empty(), option == "--brief");
}
