// Frames over a carrier: FrameReader takes them in and checks their headers, FrameWriter sends
// them. Bulk segments are not buffered: they are read to where they belong, or sent from where they
// lie.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "carriers/carrier.h"
#include "wire/codec.h"
#include "wire/frame.h"

namespace gpupool::wire {

class FrameReader {
 public:
  enum class Result {
    kFrame,    // header(), segments() and body() are there; bulk has to be read before next()
    kBlocked,  // nothing complete yet
    kClosed,   // the peer has gone
    kBad,      // not a valid frame: reason() says why
  };

  FrameReader(carriers::Carrier& carrier, uint32_t epoch);

  // With `may_wait`, never kBlocked.
  Result next(bool may_wait);

  const FrameHeader& header() const { return header_; }
  const uint32_t* segments() const { return segments_; }
  const uint8_t* body() const { return body_; }  // until the next call of next()
  const std::string& reason() const { return reason_; }

  // Bulk bytes of the current frame that were not read yet, over all its segments.
  uint64_t bulk_left() const { return bulk_left_; }
  // Reads bulk bytes, as many as there are. `bytes` at most bulk_left().
  carriers::Moved read_bulk(void* to, size_t bytes, bool may_wait);
  // The next bulk bytes where they lie, see Carrier::lend_bulk(); counted as read.
  const uint8_t* lend_bulk(size_t bytes, uint64_t* end);
  bool wait_for_bulk(size_t bytes) { return bytes <= bulk_left_ && carrier_.wait_for_bulk(bytes); }

  uint64_t sequence() const { return sequence_; }   // of the last frame
  uint64_t received() const { return received_; }   // bytes of all frames, bulk as it is read
  bool buffered() const { return begin_ != end_; }  // bytes of a further frame are there already

 private:
  Result bad(const char* reason);
  bool parse_header();

  carriers::Carrier& carrier_;
  const uint32_t epoch_;
  std::unique_ptr<uint8_t[]> buffer_;
  size_t begin_ = 0, end_ = 0;  // what is in the buffer and not taken yet
  bool have_header_ = false;
  FrameHeader header_{};
  uint32_t segments_[kMaxBulkSegments] = {};
  const uint8_t* body_ = nullptr;
  uint64_t bulk_left_ = 0;
  uint64_t sequence_ = 0;
  uint64_t received_ = 0;
  std::string reason_;
};

// One frame at a time; the owner locks.
class FrameWriter {
 public:
  FrameWriter(carriers::Carrier& carrier, uint32_t epoch) : carrier_(carrier), epoch_(epoch) {}

  // Bytes that a frame takes in the stream.
  static uint64_t frame_bytes(uint32_t body_bytes, int bulk_count, uint64_t bulk_bytes) {
    return sizeof(FrameHeader) + align8(static_cast<size_t>(bulk_count) * 4) + body_bytes +
           bulk_bytes;
  }

  // Sends one whole frame: `body_bytes` a multiple of 8, each bulk part one segment. Where the
  // carrier has no room, `blocked()` is called, which waits for room (and may read meanwhile);
  // when it returns false, or when the carrier is closed, the frame is lost and send() false.
  template <typename Blocked>
  bool send(FrameKind kind, const void* body, uint32_t body_bytes, const carriers::Part* bulk,
            int bulk_count, uint64_t acknowledged, uint64_t credit, Blocked&& blocked) {
    carriers::Part parts[kMaxBulkSegments + 3];
    int first = 0;
    const int count =
        prepare(kind, body, body_bytes, bulk, bulk_count, acknowledged, credit, parts);
    while (first < count) {
      const carriers::Moved moved = carrier_.write(parts + first, count - first, true);
      if (moved.status == carriers::Status::kOk) {
        first = advance(parts, first, count, moved.bytes);
      } else if (moved.status == carriers::Status::kClosed || !blocked()) {
        return false;
      }
    }
    return true;
  }

  uint64_t sequence() const { return sequence_; }
  uint64_t sent() const { return sent_; }  // bytes of all frames

 private:
  int prepare(FrameKind kind, const void* body, uint32_t body_bytes, const carriers::Part* bulk,
              int bulk_count, uint64_t acknowledged, uint64_t credit, carriers::Part* parts);
  static int advance(carriers::Part* parts, int first, int count, size_t bytes);

  carriers::Carrier& carrier_;
  const uint32_t epoch_;
  FrameHeader header_{};
  uint32_t segments_[kMaxBulkSegments] = {};
  uint64_t sequence_ = 0;
  uint64_t sent_ = 0;
};

}  // namespace gpupool::wire
