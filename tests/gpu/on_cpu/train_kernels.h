// The kernels of the example trainers and of the guard, as they are, for one file of a program that runs them
// on a CPU.
#pragma once

#include "gpu/on_cpu/cuda_runtime.h"

#include "cuda/record_cuda.cu"
#include "cuda/scan_cuda.cu"
#include "nccl_verdict.cu"

#include <tuple>

#include "examples/device_mlp.h"

namespace on_cpu {

template <class... Parameters>
std::function<void()> bind(void (*kernel)(Parameters...), void** arguments) {
  std::size_t next = 0;
  // In braces, so in this order.
  std::tuple<Parameters...> copies{*static_cast<Parameters*>(arguments[next++])...};
  return [=] { std::apply(kernel, copies); };
}

// The first of `kernels` that is the one.
template <class... Kernels>
std::function<void()> bind_any(const void* kernel, void** arguments, Kernels... kernels) {
  std::function<void()> bound;
  const auto try_one = [&](auto* candidate) {
    if (!bound && reinterpret_cast<const void*>(candidate) == kernel) bound = bind(candidate, arguments);
  };
  (try_one(kernels), ...);
  return bound;
}

}  // namespace on_cpu

std::function<void()> bind_kernel(const void* kernel, void** arguments) {
  using namespace holdfast::cuda;
  using namespace holdfast::example;
  return on_cpu::bind_any(kernel, arguments, scan_tiles, fill_record, publish, bias_relu, relu_backward,
                          softmax_loss, sum_rows, adam);
}
