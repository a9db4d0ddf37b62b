#include "handshake.h"

#include <gtest/gtest.h>

#include <set>

namespace holdfast {
namespace {

std::string hex(std::string_view bytes) {
  std::string text;
  for (const char c : bytes) {
    constexpr char kDigits[] = "0123456789abcdef";
    text += kDigits[static_cast<unsigned char>(c) >> 4];
    text += kDigits[static_cast<unsigned char>(c) & 15];
  }
  return text;
}

const std::string kToken(kSecretBytes, 'T');
const std::string kServerNonce(kSecretBytes, 'S');
const std::string kClientNonce(kSecretBytes, 'C');

// Computed with Python: hmac.new(b"T"*32, b"client" + b"S"*32 + b"C"*32 + b"who", "sha256").
TEST(Handshake, TheProofsAreHmacSha256OfTheStatedBytes) {
  EXPECT_EQ(hex(client_proof(kToken, kServerNonce, kClientNonce, "who")),
            "e829a90c8e9076b3eb8280a8a75103a8af60b23d8b59dddbb306c64457fb78b9");
  EXPECT_EQ(hex(server_proof(kToken, kClientNonce, kServerNonce)),
            "f6d9cacc8a0d54feb6c84557b252840c05ee179c47ba7f9c36f98d3e803db49b");
}

TEST(Handshake, EveryInputChangesTheProof) {
  std::set<std::string> proofs = {
      client_proof(kToken, kServerNonce, kClientNonce, "who"),
      client_proof(std::string(kSecretBytes, 't'), kServerNonce, kClientNonce, "who"),
      client_proof(kToken, std::string(kSecretBytes, 's'), kClientNonce, "who"),
      client_proof(kToken, kServerNonce, std::string(kSecretBytes, 'c'), "who"),
      client_proof(kToken, kServerNonce, kClientNonce, "whO"),
      client_proof(kToken, kClientNonce, kServerNonce, "who"),
      client_proof(kToken, kServerNonce, kClientNonce, ""),
      server_proof(kToken, kClientNonce, kServerNonce),
      server_proof(kToken, kServerNonce, kClientNonce),
      server_proof(std::string(kSecretBytes, 't'), kClientNonce, kServerNonce)};
  EXPECT_EQ(proofs.size(), 10u);
  for (const std::string& proof : proofs) EXPECT_EQ(proof.size(), kSecretBytes);
}

// One side's proof is never the other's, whichever way the nonces are turned.
TEST(Handshake, AProofReflectedProvesNothing) {
  for (const auto& [a, b] : {std::pair(kServerNonce, kClientNonce), std::pair(kClientNonce, kServerNonce)}) {
    EXPECT_NE(client_proof(kToken, a, b, ""), server_proof(kToken, a, b));
    EXPECT_NE(client_proof(kToken, a, b, ""), server_proof(kToken, b, a));
  }
}

TEST(Handshake, SecretsAreEqualOnlyWhenEveryByteIs) {
  EXPECT_TRUE(same_secret(kToken, std::string(kSecretBytes, 'T')));
  EXPECT_TRUE(same_secret("", ""));
  EXPECT_FALSE(same_secret(kToken, ""));
  EXPECT_FALSE(same_secret(kToken, kToken.substr(1)));
  EXPECT_FALSE(same_secret(kToken, kToken + "T"));
  for (std::size_t i = 0; i < kSecretBytes; ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string other = kToken;
      other[i] = static_cast<char>(other[i] ^ (1 << bit));
      EXPECT_FALSE(same_secret(kToken, other)) << i << " " << bit;
    }
  }
}

TEST(Handshake, SecretsAreFreshEachTime) {
  std::set<std::string> secrets;
  for (int i = 0; i < 1000; ++i) {
    std::string secret = "left over";
    ASSERT_TRUE(random_secret(&secret).ok());
    EXPECT_EQ(secret.size(), kSecretBytes);
    secrets.insert(secret);
  }
  EXPECT_EQ(secrets.size(), 1000u);
}

}  // namespace
}  // namespace holdfast
