// Proof, over a fresh connection, that both ends know the job's token, without sending it.
//
//   server -> client   nonce_s
//   client -> server   nonce_c, HMAC-SHA256(token, "client" nonce_s nonce_c identity)
//   server -> client   HMAC-SHA256(token, "server" nonce_c nonce_s)
//
// Nonces are fresh random 32 bytes, so nothing that was overheard works a second time; the labels keep one
// side's proof from serving as the other's.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "holdfast/collectives/status.h"

namespace holdfast {

inline constexpr std::size_t kSecretBytes = 32;  // tokens, nonces and proofs alike

// Cryptographically random. INTERNAL when the system has no randomness to give.
Status random_secret(std::string* secret);

std::string client_proof(std::string_view token, std::string_view server_nonce, std::string_view client_nonce,
                         std::string_view identity);
std::string server_proof(std::string_view token, std::string_view client_nonce,
                         std::string_view server_nonce);

// Takes the same time wherever the two differ.
bool same_secret(std::string_view a, std::string_view b);

}  // namespace holdfast
