#include "handshake.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>

#include <initializer_list>

namespace holdfast {
namespace {

std::string hmac(std::string_view key, std::initializer_list<std::string_view> parts) {
  std::string message;
  for (const std::string_view part : parts) message.append(part);
  std::string mac(kSecretBytes, '\0');
  unsigned int size = 0;
  HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()),
       reinterpret_cast<const unsigned char*>(message.data()), message.size(),
       reinterpret_cast<unsigned char*>(mac.data()), &size);
  return mac;
}

}  // namespace

Status random_secret(std::string* secret) {
  secret->assign(kSecretBytes, '\0');
  if (RAND_bytes(reinterpret_cast<unsigned char*>(secret->data()), static_cast<int>(kSecretBytes)) == 1) {
    return Status();
  }
  return Status::internal("OpenSSL has no random bytes to give");
}

std::string client_proof(std::string_view token, std::string_view server_nonce, std::string_view client_nonce,
                         std::string_view identity) {
  return hmac(token, {"client", server_nonce, client_nonce, identity});
}

std::string server_proof(std::string_view token, std::string_view client_nonce,
                         std::string_view server_nonce) {
  return hmac(token, {"server", client_nonce, server_nonce});
}

bool same_secret(std::string_view a, std::string_view b) {
  return a.size() == b.size() && CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

}  // namespace holdfast
