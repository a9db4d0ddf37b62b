// nccl_minimal as it is, on CPUs: HOLDFAST_ON_CPU_DEVICES says how many.
#include "gpu/on_cpu/train_kernels.h"

#include "gpu/on_cpu/nccl_on_cpu.h"

#include "examples/nccl_minimal.cu"
