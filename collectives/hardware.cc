#include "holdfast/collectives/hardware.h"

#include <dlfcn.h>
#include <hwloc.h>

#include <cstdio>
#include <cstdlib>

namespace holdfast {
namespace {

std::string list_text(hwloc_const_bitmap_t set) {
  char* text = nullptr;
  if (hwloc_bitmap_list_asprintf(&text, set) < 0) return {};
  const std::string list(text);
  std::free(text);
  return list;
}

void add_cpus(RankPlacement* placement) {
  hwloc_topology_t topology = nullptr;
  if (hwloc_topology_init(&topology) != 0) return;
  const hwloc_bitmap_t cpus = hwloc_bitmap_alloc();
  const hwloc_bitmap_t nodes = hwloc_bitmap_alloc();
  if (hwloc_topology_load(topology) == 0 && hwloc_get_cpubind(topology, cpus, HWLOC_CPUBIND_PROCESS) == 0) {
    placement->cpus = list_text(cpus);
    hwloc_cpuset_to_nodeset(topology, cpus, nodes);
    placement->numa = list_text(nodes);
  }
  hwloc_bitmap_free(nodes);
  hwloc_bitmap_free(cpus);
  hwloc_topology_destroy(topology);
}

// The few calls of the CUDA driver that are needed, by their declarations in cuda.h: 0 is success, a device
// is an int, a UUID is 16 bytes.
struct CudaUuid {
  unsigned char bytes[16];
};
using CtxGetDevice = int (*)(int* device);
using DeviceGetUuid = int (*)(CudaUuid* uuid, int device);
using DeviceGetPciBusId = int (*)(char* text, int size, int device);

std::string uuid_text(const CudaUuid& uuid) {
  std::string text = "GPU-";
  for (int i = 0; i < 16; ++i) {
    char two[3];
    std::snprintf(two, sizeof(two), "%02x", static_cast<unsigned>(uuid.bytes[i]));
    if (i == 4 || i == 6 || i == 8 || i == 10) text += "-";
    text += two;
  }
  return text;
}

void add_gpu(RankPlacement* placement) {
  // Not loaded unless the trainer uses CUDA itself: a process without a context has no GPU to name.
  void* driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  if (driver == nullptr) return;
  const auto get_device = reinterpret_cast<CtxGetDevice>(dlsym(driver, "cuCtxGetDevice"));
  const auto get_uuid = reinterpret_cast<DeviceGetUuid>(dlsym(driver, "cuDeviceGetUuid"));
  const auto get_pci = reinterpret_cast<DeviceGetPciBusId>(dlsym(driver, "cuDeviceGetPCIBusId"));
  int device = 0;
  CudaUuid uuid{};
  char pci[32] = "";
  if (get_device != nullptr && get_uuid != nullptr && get_pci != nullptr && get_device(&device) == 0 &&
      get_uuid(&uuid, device) == 0 && get_pci(pci, sizeof(pci), device) == 0) {
    placement->gpu_uuid = uuid_text(uuid);
    placement->gpu_pci = pci;
  }
  dlclose(driver);
}

}  // namespace

RankPlacement detect_placement(int rank) {
  RankPlacement placement = basic_placement(rank);
  add_cpus(&placement);
  add_gpu(&placement);
  return placement;
}

}  // namespace holdfast
