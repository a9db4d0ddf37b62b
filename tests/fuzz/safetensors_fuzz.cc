// Whatever is taken for a safetensors file is one: its header, written again, reads back the same; and a file
// is judged as its bytes are.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string_view>

#include "fuzz/expect.h"
#include "holdfast/coord/storage/safetensors.h"

namespace holdfast {
namespace {

class BytesAsFile final : public ReadableFile {
 public:
  explicit BytesAsFile(std::string_view bytes) : bytes_(bytes) {}
  std::uint64_t size() const override { return bytes_.size(); }
  Status read(std::uint64_t offset, std::span<std::byte> to) const override {
    if (offset > bytes_.size() || to.size() > bytes_.size() - offset) return Status::internal("too short");
    if (!to.empty()) std::memcpy(to.data(), bytes_.data() + offset, to.size());
    return Status();
  }

 private:
  const std::string_view bytes_;
};

bool same(const SafetensorsHeader& a, const SafetensorsHeader& b) {
  return a.metadata == b.metadata &&
         std::ranges::equal(a.tensors, b.tensors, [](const SafetensorsEntry& x, const SafetensorsEntry& y) {
           return x.name == y.name && x.dtype == y.dtype && x.shape == y.shape && x.begin == y.begin &&
                  x.end == y.end;
         });
}

void fuzz(std::string_view bytes) {
  SafetensorsHeader header;
  const bool taken = parse_safetensors_header(bytes, bytes.size(), &header).ok();
  SafetensorsHeader from_file;
  std::string raw;
  EXPECT(read_safetensors_header(BytesAsFile(bytes), &from_file, &raw).ok() == taken);
  EXPECT(same(header, from_file) && header.bytes == from_file.bytes);
  if (!taken) {
    EXPECT(header.tensors.empty() && header.metadata.empty() && raw.empty());
    return;
  }
  EXPECT(raw == bytes.substr(0, header.bytes));
  const std::uint64_t data_bytes = header.tensors.empty() ? 0 : header.tensors.back().end;
  EXPECT(header.bytes + data_bytes == bytes.size());
  std::vector<SafetensorsEntry> tensors = header.tensors;
  std::string written;
  EXPECT(write_safetensors_header(&tensors, header.metadata, &written).ok());
  EXPECT(written.size() % 8 == 0);
  SafetensorsHeader again;
  EXPECT(parse_safetensors_header(written, written.size() + data_bytes, &again).ok());
  EXPECT(same(header, again));
}

}  // namespace
}  // namespace holdfast

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  holdfast::fuzz({reinterpret_cast<const char*>(data), size});
  return 0;
}
