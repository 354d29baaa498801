// The codec, frames over a carrier, and the client's handles.
#include "wire/codec.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <thread>
#include <vector>

#include "carriers/carrier.h"
#include "client/handles.h"
#include "wire/frame_io.h"
#include "wire/operations.h"

namespace gpupool::wire {
namespace {

using carriers::Part;

struct Pair {
  Pair() {
    int ends[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    left = carriers::make_socket_carrier(ends[0]);
    right = carriers::make_socket_carrier(ends[1]);
  }
  std::unique_ptr<carriers::Carrier> left, right;
};

FrameHeader valid_header() {
  FrameHeader header{};
  header.magic = kFrameMagic;
  header.kind = static_cast<uint16_t>(FrameKind::kCommands);
  header.epoch = 3;
  header.sequence = 1;
  return header;
}

FrameReader::Result read_one(const void* bytes, size_t count) {
  Pair pair;
  EXPECT_TRUE(carriers::write_all(*pair.left, bytes, count, 1000000));
  pair.left->shutdown();
  FrameReader reader(*pair.right, 3);
  return reader.next(true);
}

TEST(Codec, ReadsBackWhatWasWritten) {
  alignas(8) uint8_t buffer[256];
  Encoder encoder(buffer);
  encoder.scalar(42);
  encoder.handle({7, 9});
  encoder.bytes("hello", 5);
  encoder.real(1.5);
  encoder.scalar(static_cast<uint64_t>(-3));
  Decoder decoder(buffer, encoder.size());
  EXPECT_EQ(decoder.narrow<uint8_t>(), 42);
  const Handle handle = decoder.handle();
  EXPECT_EQ(handle.index, 7u);
  EXPECT_EQ(handle.generation, 9u);
  EXPECT_EQ(decoder.bytes(), "hello");
  EXPECT_EQ(decoder.real(), 1.5);
  EXPECT_EQ(decoder.narrow<int>(), -3);
  EXPECT_TRUE(decoder.finished());
}

TEST(Codec, NeverReadsPastTheEnd) {
  alignas(8) uint8_t buffer[16] = {};
  Decoder empty(buffer, 0);
  EXPECT_EQ(empty.scalar(), 0u);
  EXPECT_FALSE(empty.ok());
  const uint64_t length = ~0ull - 3;  // a length whose padding overflows
  memcpy(buffer, &length, 8);
  Decoder overflow(buffer, sizeof buffer);
  EXPECT_TRUE(overflow.bytes().empty());
  EXPECT_FALSE(overflow.ok());
  const uint64_t nine = 9;
  memcpy(buffer, &nine, 8);
  Decoder longer(buffer, sizeof buffer);
  EXPECT_TRUE(longer.bytes().empty());
  EXPECT_FALSE(longer.ok());
}

TEST(Codec, ValuesBeyondTheirTypeAreMalformed) {
  alignas(8) uint8_t buffer[8];
  Encoder(buffer).scalar(256);
  Decoder decoder(buffer, 8);
  decoder.narrow<uint8_t>();
  EXPECT_FALSE(decoder.ok());
  Encoder(buffer).scalar(1ull << 31);
  Decoder other(buffer, 8);
  other.narrow<int>();
  EXPECT_FALSE(other.ok());
}

TEST(Frames, ArriveInPiecesAndWithBulk) {
  Pair pair;
  std::vector<uint8_t> bulk(3'000'000);
  for (size_t i = 0; i < bulk.size(); i++) bulk[i] = static_cast<uint8_t>(i * 31);
  std::thread sender([&] {
    FrameWriter writer(*pair.left, 3);
    uint8_t body[24] = {1, 2, 3};
    for (int round = 0; round < 3; round++) {
      std::vector<Part> parts;
      for (size_t at = 0; at < bulk.size(); at += 1'000'000)
        parts.push_back({bulk.data() + at, 1'000'000});
      ASSERT_TRUE(writer.send(FrameKind::kCommands, body, sizeof body, parts.data(),
                              static_cast<int>(parts.size()), 0, 0, [&] {
                                pair.left->wait(carriers::kWritable, -1);
                                return true;
                              }));
    }
  });
  FrameReader reader(*pair.right, 3);
  for (int round = 0; round < 3; round++) {
    ASSERT_EQ(reader.next(true), FrameReader::Result::kFrame);
    EXPECT_EQ(reader.header().body_bytes, 24u);
    EXPECT_EQ(reader.body()[2], 3);
    EXPECT_EQ(reader.bulk_left(), bulk.size());
    std::vector<uint8_t> got(bulk.size());
    for (size_t done = 0; done < got.size();) {
      const auto moved = reader.read_bulk(got.data() + done, got.size() - done, true);
      ASSERT_EQ(moved.status, carriers::Status::kOk);
      done += moved.bytes;
    }
    EXPECT_EQ(got, bulk);
  }
  sender.join();
  EXPECT_EQ(reader.sequence(), 3u);
}

TEST(Frames, WhatIsWrongIsRefused) {
  FrameHeader header = valid_header();
  EXPECT_EQ(read_one(&header, sizeof header), FrameReader::Result::kFrame);
  header = valid_header();
  header.magic++;
  EXPECT_EQ(read_one(&header, sizeof header), FrameReader::Result::kBad);
  header = valid_header();
  header.epoch = 4;
  EXPECT_EQ(read_one(&header, sizeof header), FrameReader::Result::kBad);
  header = valid_header();
  header.sequence = 2;
  EXPECT_EQ(read_one(&header, sizeof header), FrameReader::Result::kBad);
  header = valid_header();
  header.kind = 999;
  EXPECT_EQ(read_one(&header, sizeof header), FrameReader::Result::kBad);
  header = valid_header();
  header.body_bytes = kMaxFrameBody + 8;
  EXPECT_EQ(read_one(&header, sizeof header), FrameReader::Result::kBad);
  header = valid_header();
  header.body_bytes = 12;
  EXPECT_EQ(read_one(&header, sizeof header), FrameReader::Result::kBad);
  header = valid_header();
  header.bulk_count = kMaxBulkSegments + 1;
  EXPECT_EQ(read_one(&header, sizeof header), FrameReader::Result::kBad);
  header = valid_header();
  header.bulk_bytes = 1;  // but no segment
  EXPECT_EQ(read_one(&header, sizeof header), FrameReader::Result::kBad);
  struct {
    FrameHeader header;
    uint32_t sizes[2];
  } with_bulk{valid_header(), {kMaxBulkSegment + 1, 0}};
  with_bulk.header.bulk_count = 1;
  with_bulk.header.bulk_bytes = kMaxBulkSegment + 1;
  EXPECT_EQ(read_one(&with_bulk, sizeof with_bulk), FrameReader::Result::kBad);
  with_bulk.sizes[0] = 0;
  with_bulk.header.bulk_bytes = 0;
  EXPECT_EQ(read_one(&with_bulk, sizeof with_bulk), FrameReader::Result::kBad);
}

TEST(Frames, HalfAFrameIsNone) {
  const FrameHeader header = valid_header();
  EXPECT_EQ(read_one(&header, sizeof header - 1), FrameReader::Result::kClosed);
}

TEST(Operations, AreAppendOnly) {
  // Of the first version; these numbers never change.
  EXPECT_EQ(static_cast<int>(Operation::kMemAllocV2), 20);
  EXPECT_EQ(static_cast<int>(Operation::kLaunchKernel), 53);
  EXPECT_EQ(static_cast<int>(Operation::kStreamCreate), 68);
  EXPECT_EQ(operation_name(0), nullptr);
  EXPECT_EQ(operation_name(kOperationLimit), nullptr);
}

struct Thing {
  uint64_t handle = 0;
  Handle wire;
  int value = 0;
};

TEST(Handles, GarbageIsFoundOut) {
  client::Table<Thing, client::Kind::kStream> table;
  Thing* thing = table.allocate();
  EXPECT_EQ(table.find(thing->handle), nullptr) << "not published yet";
  table.publish(thing);
  const uint64_t handle = thing->handle;
  EXPECT_EQ(table.find(handle), thing);
  EXPECT_EQ(table.find(0), nullptr);
  EXPECT_EQ(table.find(1), nullptr);
  EXPECT_EQ(table.find(handle + 1), nullptr);
  EXPECT_EQ(table.find(handle + 16), nullptr) << "the next index";
  EXPECT_EQ(table.find(reinterpret_cast<uint64_t>(&table)), nullptr);
  EXPECT_EQ(table.find(~0ull), nullptr);
  EXPECT_EQ(table.find(client::make_handle(client::Kind::kEvent, thing->wire.index,
                                           thing->wire.generation)),
            nullptr)
      << "another kind";
  EXPECT_TRUE(table.retire(thing));
  EXPECT_FALSE(table.retire(thing));
  EXPECT_EQ(table.find(handle), nullptr);
}

TEST(Handles, AreNotGivenOutAgainWhileOldOnesMayBeUsed) {
  client::Table<Thing, client::Kind::kEvent> table;
  std::vector<uint64_t> seen;
  for (int i = 0; i < 5000; i++) {
    Thing* thing = table.allocate();
    ASSERT_NE(thing, nullptr);
    table.publish(thing);
    for (size_t k = seen.size() > 100 ? seen.size() - 100 : 0; k < seen.size(); k++) {
      ASSERT_NE(seen[k], thing->handle);
    }
    seen.push_back(thing->handle);
    table.retire(thing);
  }
  for (uint64_t handle : seen) EXPECT_EQ(table.find(handle), nullptr);
}

}  // namespace
}  // namespace gpupool::wire
