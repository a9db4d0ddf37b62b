// The one product of cuBLAS that the example trainers use, on a CPU.
#pragma once

#include "gpu/on_cpu/cuda_runtime.h"

enum cublasStatus_t { CUBLAS_STATUS_SUCCESS = 0 };
enum cublasOperation_t { CUBLAS_OP_N, CUBLAS_OP_T };
using cublasHandle_t = cudaStream_t*;

inline const char* cublasGetStatusString(cublasStatus_t) { return ""; }
inline cublasStatus_t cublasCreate(cublasHandle_t* handle) {
  return *handle = new cudaStream_t(nullptr), CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasDestroy(cublasHandle_t handle) { return delete handle, CUBLAS_STATUS_SUCCESS; }
inline cublasStatus_t cublasSetStream(cublasHandle_t handle, cudaStream_t stream) {
  return *handle = stream, CUBLAS_STATUS_SUCCESS;
}

// Column-major. With beta zero, c is not read: it may hold anything.
inline cublasStatus_t cublasSgemm(cublasHandle_t handle, cublasOperation_t op_a, cublasOperation_t op_b,
                                  int m, int n, int k, const float* alpha, const float* a, int lda,
                                  const float* b, int ldb, const float* beta, float* c, int ldc) {
  submit(*handle, [=, alpha = *alpha, beta = *beta] {
    for (int j = 0; j < n; ++j) {
      for (int i = 0; i < m; ++i) {
        float sum = 0;
        for (int l = 0; l < k; ++l) {
          sum += (op_a == CUBLAS_OP_N ? a[i + l * lda] : a[l + i * lda]) *
                 (op_b == CUBLAS_OP_N ? b[l + j * ldb] : b[j + l * ldb]);
        }
        float& element = c[i + j * ldc];
        element = alpha * sum + (beta == 0 ? 0 : beta * element);
      }
    }
  });
  return CUBLAS_STATUS_SUCCESS;
}
