// SHA-256 (FIPS 180-4), by OpenSSL.
#pragma once

#include <string>
#include <string_view>

namespace holdfast {

// 32 bytes.
std::string sha256(std::string_view bytes);
std::string hex(std::string_view bytes);

}  // namespace holdfast
