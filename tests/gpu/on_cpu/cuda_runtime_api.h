#pragma once

#include "gpu/on_cpu/cuda_runtime.h"
