// Memory of a check program that gives up when a CUDA call fails.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "holdfast/collectives/status.h"

namespace holdfast {

inline void must(cudaError_t code, const char* what) {
  if (code == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(code));
  std::exit(1);
}
#define MUST(call) ::holdfast::must(call, #call)

inline void must(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.message().c_str());
  std::exit(1);
}

class DeviceMemory {
 public:
  explicit DeviceMemory(std::size_t bytes) : bytes_(bytes) { MUST(cudaMalloc(&data_, bytes)); }
  ~DeviceMemory() { static_cast<void>(cudaFree(data_)); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  std::byte* data() const { return static_cast<std::byte*>(data_); }
  std::size_t bytes() const { return bytes_; }
  void copy_from(const void* host, std::size_t bytes) const {
    MUST(cudaMemcpy(data_, host, bytes, cudaMemcpyHostToDevice));
  }

 private:
  void* data_ = nullptr;
  const std::size_t bytes_;
};

template <class T>
class PinnedArray {
 public:
  explicit PinnedArray(std::size_t count) : count_(count) { MUST(cudaMallocHost(&data_, count * sizeof(T))); }
  ~PinnedArray() { static_cast<void>(cudaFreeHost(data_)); }
  PinnedArray(const PinnedArray&) = delete;
  PinnedArray& operator=(const PinnedArray&) = delete;

  T* data() { return static_cast<T*>(data_); }
  std::size_t size() const { return count_; }
  T& operator[](std::size_t i) { return data()[i]; }

 private:
  void* data_ = nullptr;
  const std::size_t count_;
};

}  // namespace holdfast
