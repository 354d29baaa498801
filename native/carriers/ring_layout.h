// The region of shared memory that two processes have a ring carrier in (doc/rings.md). Everything
// is an offset from the region's beginning: it may lie at different addresses on both sides, in a
// memfd or in a part of a device's memory.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace gpupool::carriers {

constexpr uint32_t kRingMagic = 0x52505047;  // "GPPR"
constexpr uint32_t kRingVersion = 1;
constexpr uint32_t kRingControlBytes = 4096;
constexpr uint32_t kBulkAlignment = 64;  // the bulk data of a frame begin at a multiple of it

// Positions are bytes since the beginning, so they never wrap; a ring's capacity is a power of two.
// Each word has a cache line of its own, two with the one that the processor fetches along.
struct RingWord {
  alignas(128) std::atomic<uint64_t> value;
};

// One direction.
struct RingDirection {
  RingWord command_tail;     // written by the producer: what it has put in
  RingWord bulk_tail;        // the same of the bulk ring
  RingWord command_head;     // written by the consumer: what it has taken out
  RingWord bulk_head;        // the same of the bulk ring
  RingWord consumer_sleeps;  // 1: the consumer wants the bell for new data; the producer clears it
  RingWord producer_sleeps;  // 1: the producer wants the bell for room; the consumer clears it
};

struct RingControl {
  // Written by the host before anybody uses the region.
  uint32_t magic;
  uint32_t version;
  uint32_t command_bytes;
  uint32_t bulk_bytes;
  // Written by the host at any time.
  alignas(128) std::atomic<uint32_t> epoch;        // another one: this session's use is over
  std::atomic<uint32_t> worker_dead, client_dead;  // 1: the host has seen that process end
  // Written by the worker: 1, if the host's limit lets this session's threads spin.
  alignas(128) std::atomic<uint32_t> may_spin;
  RingDirection to_worker, to_client;
};
static_assert(sizeof(RingControl) <= kRingControlBytes);
static_assert(std::atomic<uint64_t>::is_always_lock_free);

// Sizes of the rings of one direction; both directions are alike. They are agreed upon in the
// handshake and never read from the region.
struct RingLayout {
  uint32_t command_bytes = 256 * 1024;
  uint32_t bulk_bytes = 4 * 1024 * 1024;

  static constexpr bool power_of_two(uint32_t value) { return (value & (value - 1)) == 0; }
  bool valid() const {
    return power_of_two(command_bytes) && power_of_two(bulk_bytes) && command_bytes >= 4096 &&
           command_bytes <= (16u << 20) && bulk_bytes >= 65536 && bulk_bytes <= (1u << 30);
  }
  uint64_t region_bytes() const {
    return kRingControlBytes + 2 * (uint64_t{command_bytes} + bulk_bytes);
  }
  // Control page, then commands and bulk data to the worker, then both to the client.
  uint64_t command_offset(bool to_worker) const {
    return kRingControlBytes + (to_worker ? 0 : uint64_t{command_bytes} + bulk_bytes);
  }
  uint64_t bulk_offset(bool to_worker) const { return command_offset(to_worker) + command_bytes; }
};

}  // namespace gpupool::carriers
