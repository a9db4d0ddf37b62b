// The scan beside a plain read of the same bytes, and beside what people use in its place. Each result is
// checked.
#include <benchmark/benchmark.h>
#include <fmt/format.h>
#define XXH_STATIC_LINKING_ONLY  // a state on the stack
#include <xxhash.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>

#include "contest.h"
#include "holdfast/float_bits.h"
#include "holdfast/fused_scan.h"
#include "holdfast/half.h"
#include "holdfast/scan.h"
#include "read_kernels.h"
#ifdef HOLDFAST_BENCH_TORCH
#include "torch_isfinite.h"
#endif

namespace {

using namespace holdfast;
using namespace holdfast::bench;

constexpr std::size_t kLargest = std::size_t{512} << 20;
const std::vector<std::pair<std::string, std::size_t>> kSizes = {{"32KiB", std::size_t{32} << 10},
                                                                 {"1MiB", std::size_t{1} << 20},
                                                                 {"32MiB", std::size_t{32} << 20},
                                                                 {"512MiB", kLargest}};
const std::vector<DType> kDTypes = {DType::kFloat64,   DType::kFloat32,      DType::kFloat16,
                                    DType::kBFloat16,  DType::kFloat8E4M3FN, DType::kFloat8E5M2,
                                    DType::kComplex64, DType::kComplex128};

void require(bool good, const char* what) {
  if (good) return;
  fmt::print(stderr, "scan_bench: wrong result: {}\n", what);
  std::exit(1);
}

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<unsigned char, Free>;
Memory allocate(std::size_t bytes) {
  return Memory(static_cast<unsigned char*>(std::aligned_alloc(4096, bytes)));
}

// What a scan has to find.
struct Expected {
  double abs_max = 0;
  double sum_of_squares = 0;

  void add(double value) {
    abs_max = std::max(abs_max, std::abs(value));
    sum_of_squares += value * value;
  }
};

struct Values {
  Memory memory;
  Expected of_first, of_block;  // of the first 32 KiB, and of 1 MiB, which is there over and over

  Expected of(std::size_t bytes) const {
    if (bytes == kSizes[0].second) return of_first;
    return {of_block.abs_max, of_block.sum_of_squares * static_cast<double>(bytes / kSizes[1].second)};
  }
};

double fp8_value(DType dtype, std::uint8_t bits) {
  if (dtype == DType::kFloat8E5M2) return static_cast<double>(from_fp16(e5m2_as_float16(bits)));
  return static_cast<double>(from_fp16(e4m3fn_magnitude_as_float16(bits)) * kE4M3FNScale);
}

// Normal values, of the deviation that gradients have in the middle of a run.
Values normal_values(DType dtype) {
  Values made{allocate(kLargest), {}, {}};
  const Memory& memory = made.memory;
  const std::size_t block = kSizes[1].second;
  const bool complex = dtype == DType::kComplex64 || dtype == DType::kComplex128;
  const auto width = static_cast<std::size_t>(dtype_size(dtype)) / (complex ? 2 : 1);  // of a part
  std::mt19937_64 random(1);
  std::normal_distribution<float> normal(0.0f, 0.01f);
  for (std::size_t at = 0; at < block; at += width) {
    const float value = normal(random);
    const double wide = static_cast<double>(value);
    const std::uint16_t half = dtype == DType::kFloat16 ? to_fp16(value) : to_bf16(value);
    const auto byte = static_cast<std::uint8_t>(0x20u | (random() & 0x9fu));  // magnitudes 2^-3 to 2^0, or so
    double stored = wide;
    switch (dtype) {
      case DType::kComplex128:
      case DType::kFloat64: std::memcpy(&memory.get()[at], &wide, 8); break;
      case DType::kComplex64:
      case DType::kFloat32: std::memcpy(&memory.get()[at], &value, 4); break;
      case DType::kFloat16:
      case DType::kBFloat16:
        std::memcpy(&memory.get()[at], &half, 2);
        stored = static_cast<double>(dtype == DType::kFloat16 ? from_fp16(half) : from_bf16(half));
        break;
      default:
        memory.get()[at] = byte;
        stored = fp8_value(dtype, byte);
        break;
    }
    made.of_block.add(stored);
    if (at < kSizes[0].second) made.of_first.add(stored);
  }
  for (std::size_t at = block; at < kLargest; at += block)
    std::memcpy(&memory.get()[at], memory.get(), block);
  return made;
}

TensorView view_of(const Memory& memory, DType dtype, std::size_t bytes) {
  return TensorView::contiguous(memory.get(), dtype, static_cast<std::int64_t>(bytes) / dtype_size(dtype));
}

void check_scan(const TensorView& view, const Expected& expected) {
  const Probe probe = scan(view);
  require(probe.finite() && probe.count == static_cast<std::uint64_t>(view.element_count) &&
              probe.abs_max == expected.abs_max,
          "counts or abs-max");
  require(std::abs(probe.squares.value() - expected.sum_of_squares) <= 0x1p-16 * expected.sum_of_squares,
          "sum of squares");
}

// Of values that the benchmark has made itself.
void check_finite(const TensorView& view) {
  const Probe probe = scan(view);
  benchmark::DoNotOptimize(probe.squares.medium);
  require(probe.finite() && probe.count == static_cast<std::uint64_t>(view.element_count), "finite values");
}

// ---- lines for people and scripts

void print_ratio(const std::string& what, const std::string& name, double ratio) {
  fmt::print("ratio {} {}={:.2f}\n", what, name, ratio);
}

void summarise_reads(DType dtype, const Values& values) {
  const Memory& memory = values.memory;
  for (const auto& [size, bytes] : kSizes) {
    const TensorView view = view_of(memory, dtype, bytes);
    const auto read = [&, n = bytes] { require(read_all(memory.get(), n) != 0, "read"); };
    const Expected expected = values.of(bytes);
    const auto seconds = contest({read, [&] { check_scan(view, expected); }, read}, 15, 0.004);
    fmt::print("speed dtype={} size={} read={:.1f} scan={:.1f} GB/s\n", dtype_name(dtype), size,
               static_cast<double>(bytes) / seconds[0] * 1e-9,
               static_cast<double>(bytes) / seconds[1] * 1e-9);
    const std::string what = fmt::format("dtype={} size={}", dtype_name(dtype), size);
    print_ratio(what, "scan_over_read", seconds[0] / seconds[1]);
    print_ratio(what, "control_read_over_read", seconds[0] / seconds[2]);
  }
}

void summarise_alternatives(DType dtype, const Values& made) {
  const Memory& memory = made.memory;
  const TensorView view = view_of(memory, dtype, kLargest);
  const std::string what = fmt::format("dtype={} size=512MiB", dtype_name(dtype));
#ifdef HOLDFAST_BENCH_TORCH
  if (torch_has(dtype)) {
    const auto seconds =
        contest({[&] { require(torch_is_finite(view), "isfinite"); }, [&] { check_finite(view); }}, 3, 0.0);
    print_ratio(what, "scan_over_isfinite", seconds[0] / seconds[1]);
  }
#endif
  if (dtype != DType::kFloat32) return;
  const auto* values = reinterpret_cast<const float*>(memory.get());
  const auto count = static_cast<std::size_t>(view.element_count);
  const auto seconds =
      contest({[&] { check_finite(view); }, [&] { require(std::isfinite(sum_alone(values, count)), "sum"); },
               [&] { require(norm_alone(values, count) > 0, "norm"); }},
              9, 0.0);
  print_ratio(what, "scan_over_float_sum", seconds[1] / seconds[0]);
  print_ratio(what, "scan_over_norm_alone", seconds[2] / seconds[0]);
}

// The speed where no value is finite, as a part of that where all are.
void summarise_bad(DType dtype, const Values& values) {
  const Memory& memory = values.memory;
  const std::size_t bytes = std::size_t{64} << 20;
  const TensorView good = view_of(memory, dtype, bytes);
  Memory bad_memory = allocate(bytes);
  std::memset(bad_memory.get(), 0xff, bytes);
  const TensorView bad = view_of(bad_memory, dtype, bytes);
  const auto count = static_cast<std::uint64_t>(bad.element_count);
  const auto seconds = contest(
      {[&] { check_finite(good); }, [&] { require(scan(bad).bad.nan == count, "all NaN"); }}, 9, 0.01);
  print_ratio(fmt::format("dtype={} size=64MiB", dtype_name(dtype)), "all_nan_over_finite",
              seconds[0] / seconds[1]);
}

void summarise_fused(const Memory& memory) {
  for (const auto& [size, bytes] : {kSizes[1], kSizes[3]}) {
    const std::size_t count = bytes / 8;  // input and output together make `bytes`, or so
    const std::span<const float> from(reinterpret_cast<const float*>(memory.get()), count);
    Memory out_memory = allocate(kLargest);
    std::memset(out_memory.get(), 0, kLargest);
    const std::span<float> wide(reinterpret_cast<float*>(out_memory.get()), count);
    const std::span<std::uint16_t> half(reinterpret_cast<std::uint16_t*>(out_memory.get()), count);
    const TensorView half_view =
        TensorView::contiguous(half.data(), DType::kBFloat16, static_cast<std::int64_t>(count));
    const std::string what = fmt::format("dtype=float32 size={}", size);

    auto seconds =
        contest({[&] {
                   narrow(from, DType::kBFloat16, half);
                   check_finite(half_view);
                 },
                 [&] { require(narrow_and_scan(from, DType::kBFloat16, half).finite(), "narrow"); },
                 [&] { narrow(from, DType::kBFloat16, half); }},
                9, 0.01);
    print_ratio(what, "fused_narrow_over_separate", seconds[0] / seconds[1]);
    print_ratio(what, "fused_narrow_over_narrow_alone", seconds[2] / seconds[1]);

    std::ranges::copy(from, wide.begin());
    float factor = 2.0f;  // there and back again
    const auto scale = [&] {
      factor = 1.0f / factor;
      for (float& value : wide) value *= factor;
      benchmark::DoNotOptimize(wide.data());
    };
    seconds = contest({[&] {
                         scale();
                         check_finite(TensorView::of(wide));
                       },
                       [&] {
                         factor = 1.0f / factor;
                         require(scale_and_scan(wide, factor).finite(), "scale");
                       },
                       scale},
                      9, 0.01);
    print_ratio(what, "fused_scale_over_separate", seconds[0] / seconds[1]);
    print_ratio(what, "fused_scale_over_scale_alone", seconds[2] / seconds[1]);

    const TensorView view = TensorView::of(from);
    const XXH128_hash_t wanted = XXH3_128bits(view.data, from.size_bytes());
    const auto digest = [&] {
      require(XXH3_128bits(view.data, from.size_bytes()).low64 == wanted.low64, "digest");
    };
    seconds =
        contest({[&] {
                   digest();
                   check_finite(view);
                 },
                 [&] {
                   Digest128 found;
                   require(scan_and_digest(view, &found).finite() && found.low == wanted.low64, "digest");
                 },
                 digest},
                9, 0.01);
    print_ratio(what, "fused_digest_over_separate", seconds[0] / seconds[1]);
    print_ratio(what, "fused_digest_over_digest_alone", seconds[2] / seconds[1]);
  }
}

// Lists of small tensors: the cost of one tensor of one row.
void summarise_lists(const Memory& memory) {
  for (const std::int64_t elements : {1, 64, 1000}) {
    std::vector<TensorView> views;
    for (std::int64_t t = 0; t < 300; ++t) {
      views.push_back(TensorView::of(
          {reinterpret_cast<const float*>(memory.get()) + t * elements, static_cast<std::size_t>(elements)}));
    }
    std::vector<Probe> probes(views.size());
    const auto seconds = contest({[&] {
                                   scan(views, probes);
                                   require(probes.back().finite() && probes.back().count > 0, "list");
                                 }},
                                 15, 0.004);
    fmt::print("time tensors=300 elements={} per_tensor={:.1f} ns\n", elements, seconds[0] / 300 * 1e9);
  }
}

void summarise() {
  for (const DType dtype : kDTypes) {
    const Values values = normal_values(dtype);
    summarise_reads(dtype, values);
    summarise_alternatives(dtype, values);
    summarise_bad(dtype, values);
    if (dtype != DType::kFloat32) continue;
    summarise_fused(values.memory);
    summarise_lists(values.memory);
  }
}

// ---- Google Benchmark

void bench_scan(benchmark::State& state, DType dtype, std::size_t bytes) {
  const Values values = normal_values(dtype);
  const TensorView view = view_of(values.memory, dtype, bytes);
  const Expected expected = values.of(bytes);
  for (auto _ : state) check_scan(view, expected);
  state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(bytes));
}

void bench_read(benchmark::State& state, std::size_t bytes) {
  const Values values = normal_values(DType::kFloat32);
  for (auto _ : state) require(read_all(values.memory.get(), bytes) != 0, "read");
  state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(bytes));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 2 && std::string(argv[1]) == "--summary") {
    summarise();
    return 0;
  }
  for (const auto& [size, bytes] : kSizes) {
    benchmark::RegisterBenchmark(("read/" + size).c_str(), bench_read, bytes);
    for (const DType dtype : kDTypes) {
      benchmark::RegisterBenchmark(fmt::format("scan/{}/{}", dtype_name(dtype), size).c_str(), bench_scan,
                                   dtype, bytes);
    }
  }
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 64;
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
