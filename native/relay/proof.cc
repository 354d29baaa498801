#include "relay/proof.h"

#include <sodium.h>
#include <string.h>

namespace gpupool::relay {
namespace {

void proof_of(const Preamble& preamble, const uint8_t (&secret)[32], uint8_t (&proof)[32]) {
  uint8_t text[sizeof preamble.id + sizeof preamble.count];
  memcpy(text, preamble.id, sizeof preamble.id);
  memcpy(text + sizeof preamble.id, &preamble.count, sizeof preamble.count);
  static_assert(sizeof proof == crypto_auth_hmacsha256_BYTES);
  crypto_auth_hmacsha256(proof, text, sizeof text, secret);
}

}  // namespace

void prove(Preamble& preamble, const uint8_t (&secret)[32]) {
  proof_of(preamble, secret, preamble.proof);
}

bool proves(const Preamble& preamble, const uint8_t (&secret)[32]) {
  uint8_t proof[32];
  proof_of(preamble, secret, proof);
  return sodium_memcmp(proof, preamble.proof, sizeof proof) == 0;
}

}  // namespace gpupool::relay
