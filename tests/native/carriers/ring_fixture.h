// Two ends of a ring in one process: a memfd mapped twice, a socket pair as the bell.
#pragma once

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "carriers/ring.h"

namespace gpupool::test {

using namespace gpupool::carriers;

constexpr uint32_t kRingEpoch = 5;
constexpr RingLayout kSmall{4096, 65536};

struct RingPair {
  explicit RingPair(RingLayout with = kSmall, SpinGate* gate = nullptr) : layout(with) {
    std::string why;
    memfd = make_ring_memfd(layout, kRingEpoch, &why);
    EXPECT_GE(memfd, 0) << why;
    int ends[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    region = map_ring(memfd, layout, &why);
    client = make_ring_carrier(map_ring(memfd, layout, &why), layout, RingSide::kClient, kRingEpoch,
                               make_socket_bell(ends[0]));
    worker = make_ring_carrier(map_ring(memfd, layout, &why), layout, RingSide::kWorker, kRingEpoch,
                               make_socket_bell(ends[1]), gate);
  }
  ~RingPair() { close(memfd); }

  // What a hostile process can write to: everything.
  RingControl& control() { return *reinterpret_cast<RingControl*>(region->base()); }

  const RingLayout layout;
  int memfd = -1;
  std::unique_ptr<RingRegion> region;
  std::unique_ptr<Carrier> client, worker;
};

inline Moved write_one(Carrier& carrier, const void* data, size_t bytes, bool bulk = false,
                       bool may_wait = false) {
  const Part part{const_cast<void*>(data), bytes, bulk};
  return carrier.write(&part, 1, may_wait);
}

// Writes all, waiting for room.
inline bool write_whole(Carrier& carrier, const uint8_t* data, size_t bytes, bool bulk) {
  while (bytes > 0) {
    const Moved moved = write_one(carrier, data, bytes, bulk);
    if (moved.status == Status::kClosed) return false;
    if (moved.status == Status::kBlocked) {
      carrier.wait(kWritable, -1);
      continue;
    }
    data += moved.bytes;
    bytes -= moved.bytes;
  }
  return true;
}

inline bool read_whole(Carrier& carrier, uint8_t* data, size_t bytes, bool bulk) {
  while (bytes > 0) {
    const Part part{data, bytes};
    const Moved moved = bulk ? carrier.read_bulk(data, bytes, true) : carrier.read(&part, 1, true);
    if (moved.status != Status::kOk) return false;
    data += moved.bytes;
    bytes -= moved.bytes;
  }
  return true;
}

// The n-th byte of a stream, by a rule of the test's own.
inline uint8_t pattern(uint64_t n, uint64_t seed) {
  return static_cast<uint8_t>((n * 0x9E3779B97F4A7C15ull + seed) >> 56);
}

inline std::vector<uint8_t> piece_of(uint64_t from, size_t bytes, uint64_t seed) {
  std::vector<uint8_t> data(bytes);
  for (size_t i = 0; i < bytes; i++) data[i] = pattern(from + i, seed);
  return data;
}

}  // namespace gpupool::test
