#include "holdfast/coord/storage/sha256.h"

#include <openssl/sha.h>

#include <cstdlib>

namespace holdfast {

std::string sha256(std::string_view bytes) {
  std::string digest(SHA256_DIGEST_LENGTH, '\0');
  const auto* in = reinterpret_cast<const unsigned char*>(bytes.data());
  auto* out = reinterpret_cast<unsigned char*>(digest.data());
  // Without SHA-256 in this OpenSSL nothing could be told from anything else.
  if (SHA256(in, bytes.size(), out) == nullptr) std::abort();
  return digest;
}

std::string hex(std::string_view bytes) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string text;
  text.reserve(2 * bytes.size());
  for (const char c : bytes) {
    const auto byte = static_cast<unsigned char>(c);
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

}  // namespace holdfast
