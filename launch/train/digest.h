// Digests of training state: equal digests mean equal bits.
#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace holdfast::train {

// XXH3-128 of memory added piece by piece, as 32 hexadecimal digits.
class Digest {
 public:
  Digest();
  ~Digest();
  Digest(const Digest&) = delete;
  Digest& operator=(const Digest&) = delete;

  void add(const void* data, std::size_t bytes);
  void add(std::span<const float> values) { add(values.data(), values.size_bytes()); }
  std::string hex() const;

 private:
  void* const state_;
};

}  // namespace holdfast::train
