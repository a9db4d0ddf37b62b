#include "holdfast/coord/printable.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

namespace holdfast {

std::string printable(std::string_view text) {
  std::string shown;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    // In UTF-8, U+0080 to U+009F are controls too: 0xc2 and then the byte itself.
    const bool c1 = byte == 0xc2 && i + 1 < text.size() && static_cast<unsigned char>(text[i + 1]) >= 0x80 &&
                    static_cast<unsigned char>(text[i + 1]) < 0xa0;
    if (c1) {
      shown += fmt::format("\\x{:02x}", static_cast<unsigned char>(text[++i]));
    } else if (byte < 0x20 || byte == 0x7f) {
      shown += fmt::format("\\x{:02x}", byte);
    } else {
      shown += text[i];
    }
  }
  return shown;
}

bool is_utf8(std::string_view text) {
  try {
    (void)nlohmann::json(text).dump();  // strict about it, as the standard is
    return true;
  } catch (const nlohmann::json::type_error&) {
    return false;
  }
}

}  // namespace holdfast
