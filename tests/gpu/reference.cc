#include "gpu/reference.h"

#include <cstdio>
#include <cstdlib>

#if HOLDFAST_CHECK_WITHOUT_HIGHWAY
#include "ranks/scan_cuda_host.h"
#endif

namespace holdfast {

#if HOLDFAST_CHECK_WITHOUT_HIGHWAY

std::vector<Probe> reference(std::span<const TensorView> tensors) {
  cuda::ScanPlan plan;
  if (const Status status = cuda::plan_scan(tensors, &plan); !status.ok()) {
    std::fprintf(stderr, "reference: %s\n", status.message().c_str());
    std::exit(1);
  }
  std::vector<Probe> probes;
  const HostLaunch launch(plan);
  for (const CudaProbe& result : launch.results()) probes.push_back(to_probe(result));
  return probes;
}

const char* reference_name() { return "the kernel's steps on a CPU (no Highway)"; }

#else

std::vector<Probe> reference(std::span<const TensorView> tensors) {
  std::vector<Probe> probes(tensors.size());
  scan(tensors, probes);
  return probes;
}

const char* reference_name() { return "the CPU's scan"; }

#endif

}  // namespace holdfast
