// The kernel and its check as they are, compiled for the CPU by the header beside this file.
#include "gpu/on_cpu/cuda_runtime.h"

#include "cuda/scan_cuda.cu"
#include "gpu/scan_check.cu"

std::function<void()> bind_kernel(const void* kernel, void** arguments) {
  using holdfast::cuda::Tables;
  const auto call = reinterpret_cast<void (*)(Tables)>(const_cast<void*>(kernel));
  return [call, tables = *static_cast<const Tables*>(arguments[0])] { call(tables); };
}

bool holdfast::measure_speed() { return true; }
