// How relays of two hosts find each other: before TLS, the one that connects says in the clear
// whether a session begins or goes on. What it says only leads to the right process, which tells
// those apart who may go on; who it is, TLS tells.
#pragma once

#include <cstdint>

namespace gpupool::relay {

constexpr uint64_t kPreambleMagic = 0x31594c4552504731;  // "1GPRELY1"

enum class Wish : uint32_t { kNew = 1, kResume = 2 };

struct Preamble {
  uint64_t magic;
  uint32_t wish;
  uint32_t reserved;  // 0
  uint8_t id[16];     // random, of the session's link
  // Of one that goes on: which attempt it is, and that it comes from who began: HMAC-SHA256(secret
  // of the first connection, id | count). So who has seen a preamble can do nothing with it.
  uint64_t count;
  uint8_t proof[32];
};
static_assert(sizeof(Preamble) == 72);

// One byte in return: then TLS begins, or the connection ends.
constexpr char kGoOn = 'y', kUnknown = 'n', kBusy = 'b';

constexpr int64_t kHalfOpenNs = 5'000'000'000;  // for preamble and TLS

}  // namespace gpupool::relay
