// Integers and strings as bytes: little-endian, strings with a 32-bit length. For frames between our own
// processes; a reader of bytes from elsewhere never reads past their end.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace holdfast {

class ByteWriter {
 public:
  ByteWriter& u8(std::uint8_t v) { return put(v, 1); }
  ByteWriter& u32(std::uint32_t v) { return put(v, 4); }
  ByteWriter& u64(std::uint64_t v) { return put(v, 8); }
  ByteWriter& raw(std::string_view bytes) {
    bytes_.append(bytes);
    return *this;
  }
  ByteWriter& text(std::string_view text) { return u32(static_cast<std::uint32_t>(text.size())).raw(text); }
  std::string take() { return std::move(bytes_); }

 private:
  ByteWriter& put(std::uint64_t v, int width) {
    for (int i = 0; i < width; ++i) bytes_.push_back(static_cast<char>(v >> (8 * i)));
    return *this;
  }
  std::string bytes_;
};

// After a read past the end, every read gives zero or "" and ok() is false.
class ByteReader {
 public:
  explicit ByteReader(std::string_view bytes) : bytes_(bytes) {}

  std::uint8_t u8() { return static_cast<std::uint8_t>(get(1)); }
  std::uint32_t u32() { return static_cast<std::uint32_t>(get(4)); }
  std::uint64_t u64() { return get(8); }
  std::string_view raw(std::size_t size) {
    if (!ok_ || size > bytes_.size()) {
      ok_ = false;
      return {};
    }
    const std::string_view taken = bytes_.substr(0, size);
    bytes_.remove_prefix(size);
    return taken;
  }
  std::string_view text() { return raw(u32()); }

  bool ok() const { return ok_; }
  bool done() const { return ok_ && bytes_.empty(); }

 private:
  std::uint64_t get(std::size_t width) {
    const std::string_view taken = raw(width);
    std::uint64_t v = 0;
    for (std::size_t i = 0; i < taken.size(); ++i) {
      v |= static_cast<std::uint64_t>(static_cast<unsigned char>(taken[i])) << (8 * i);
    }
    return v;
  }
  std::string_view bytes_;
  bool ok_ = true;
};

}  // namespace holdfast
