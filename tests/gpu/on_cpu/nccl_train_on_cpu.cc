// nccl_train as it is, on CPUs: mpirun -np 2 with HOLDFAST_ON_CPU_DEVICES=2.
#include "gpu/on_cpu/train_kernels.h"

#include "gpu/on_cpu/nccl_on_cpu.h"

#include "examples/nccl_train.cu"
