// Copies of the buffers that a forward pass mutates.
#pragma once

#include <cstddef>
#include <cstring>
#include <vector>

namespace holdfast {

class BufferSnapshot {
 public:
  void add(void* data, std::size_t bytes) {
    if (bytes > 0) buffers_.push_back({data, std::vector<char>(bytes)});
  }

  void take() {
    for (Buffer& b : buffers_) std::memcpy(b.copy.data(), b.data, b.copy.size());
  }
  void restore() const {
    for (const Buffer& b : buffers_) std::memcpy(b.data, b.copy.data(), b.copy.size());
  }

 private:
  struct Buffer {
    void* data;
    std::vector<char> copy;
  };
  std::vector<Buffer> buffers_;
};

}  // namespace holdfast
