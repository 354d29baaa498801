#include "wire/frame_io.h"

#include <string.h>

namespace gpupool::wire {

using carriers::Moved;
using carriers::Part;
using carriers::Status;

namespace {
// A whole frame without its bulk, and as much again of what follows it.
constexpr size_t kBufferBytes = 2 * (kMaxFrameBody + 128);
constexpr size_t kReadAhead = 128 * 1024;  // more would only copy bulk data once more
}  // namespace

FrameReader::FrameReader(carriers::Carrier& carrier, uint32_t epoch)
    : carrier_(carrier), epoch_(epoch), buffer_(new uint8_t[kBufferBytes]) {}

FrameReader::Result FrameReader::bad(const char* reason) {
  reason_ = reason;
  return Result::kBad;
}

// Everything but the segments' sizes, which are not there yet.
bool FrameReader::parse_header() {
  const FrameHeader& h = header_;
  const auto kind = static_cast<FrameKind>(h.kind);
  if (h.magic != kFrameMagic) return bad("wrong magic number"), false;
  if (kind != FrameKind::kCommands && kind != FrameKind::kReplies && kind != FrameKind::kEvents &&
      kind != FrameKind::kCredit && kind != FrameKind::kRefused && kind != FrameKind::kControl) {
    return bad("unknown kind of frame"), false;
  }
  if (h.epoch != epoch_) return bad("a frame of another session"), false;
  if (h.sequence != sequence_ + 1) return bad("a frame is missing or repeated"), false;
  if (h.body_bytes > kMaxFrameBody || h.body_bytes % 8 != 0) return bad("wrong body size"), false;
  if (h.bulk_count > kMaxBulkSegments) return bad("too many bulk segments"), false;
  return true;
}

FrameReader::Result FrameReader::next(bool may_wait) {
  if (!reason_.empty()) return Result::kBad;
  if (bulk_left_ != 0) return bad("bulk data was not taken");
  for (;;) {
    const size_t there = end_ - begin_;
    const uint8_t* at = buffer_.get() + begin_;
    size_t needed = sizeof(FrameHeader);
    if (there >= needed) {
      if (!have_header_) {
        memcpy(&header_, at, sizeof header_);
        if (!parse_header()) return Result::kBad;
        have_header_ = true;
      }
      const size_t list = align8(size_t{header_.bulk_count} * 4);
      needed += list + header_.body_bytes;
      if (there >= needed) {
        memset(segments_, 0, sizeof segments_);
        memcpy(segments_, at + sizeof(FrameHeader), size_t{header_.bulk_count} * 4);
        uint64_t total = 0;
        for (int i = 0; i < header_.bulk_count; i++) {
          if (segments_[i] == 0 || segments_[i] > kMaxBulkSegment) return bad("wrong segment size");
          total += segments_[i];
        }
        if (total != header_.bulk_bytes) return bad("bulk sizes contradict each other");
        body_ = at + sizeof(FrameHeader) + list;
        begin_ += needed;
        if (begin_ == end_) begin_ = end_ = 0;  // body_ stays where it is until the next read
        have_header_ = false;
        bulk_left_ = total;
        if (total != 0) carrier_.begin_bulk_in();
        sequence_ = header_.sequence;
        received_ += needed;
        return Result::kFrame;
      }
    }
    if (begin_ != 0 && (begin_ + needed > kBufferBytes || kBufferBytes - end_ < 4096)) {
      memmove(buffer_.get(), at, there);
      begin_ = 0;
      end_ = there;
    }
    size_t room = kBufferBytes - end_;
    const size_t useful = needed - there + kReadAhead;
    if (room > useful) room = useful;
    const Part part{buffer_.get() + end_, room};
    const Moved moved = carrier_.read(&part, 1, may_wait);
    if (moved.status == Status::kBlocked) return Result::kBlocked;
    if (moved.status == Status::kClosed) {
      return carrier_.broken() != nullptr ? bad(carrier_.broken()) : Result::kClosed;
    }
    end_ += moved.bytes;
  }
}

Moved FrameReader::read_bulk(void* to, size_t bytes, bool may_wait) {
  if (bytes > bulk_left_) bytes = static_cast<size_t>(bulk_left_);
  if (bytes == 0) return {Status::kBlocked, 0};
  const size_t there = end_ - begin_;
  if (there > 0 && !carrier_.bulk_apart()) {
    // What was read ahead stays in the buffer behind body_.
    if (bytes > there) bytes = there;
    memcpy(to, buffer_.get() + begin_, bytes);
    begin_ += bytes;
    bulk_left_ -= bytes;
    received_ += bytes;
    return {Status::kOk, bytes};
  }
  const Moved moved = carrier_.read_bulk(to, bytes, may_wait);
  if (moved.status == Status::kOk) {
    bulk_left_ -= moved.bytes;
    received_ += moved.bytes;
  }
  return moved;
}

const uint8_t* FrameReader::lend_bulk(size_t bytes, uint64_t* end) {
  if (bytes > bulk_left_) return nullptr;
  const uint8_t* at = carrier_.lend_bulk(bytes, end);
  if (at != nullptr) {
    bulk_left_ -= bytes;
    received_ += bytes;
  }
  return at;
}

int FrameWriter::prepare(FrameKind kind, const void* body, uint32_t body_bytes, const Part* bulk,
                         int bulk_count, uint64_t acknowledged, uint64_t credit, Part* parts) {
  uint64_t total = 0;
  memset(segments_, 0, sizeof segments_);
  for (int i = 0; i < bulk_count; i++) {
    segments_[i] = static_cast<uint32_t>(bulk[i].bytes);
    total += bulk[i].bytes;
  }
  header_ = FrameHeader{kFrameMagic,
                        static_cast<uint16_t>(kind),
                        static_cast<uint16_t>(bulk_count),
                        body_bytes,
                        epoch_,
                        ++sequence_,
                        acknowledged,
                        credit,
                        total};
  sent_ += frame_bytes(body_bytes, bulk_count, total);
  int count = 0;
  parts[count++] = {&header_, sizeof header_};
  if (bulk_count > 0) parts[count++] = {segments_, align8(static_cast<size_t>(bulk_count) * 4)};
  if (body_bytes > 0) parts[count++] = {const_cast<void*>(body), body_bytes};
  if (bulk_count > 0) carrier_.begin_bulk_out();
  for (int i = 0; i < bulk_count; i++) parts[count++] = {bulk[i].data, bulk[i].bytes, true};
  return count;
}

int FrameWriter::advance(Part* parts, int first, int count, size_t bytes) {
  while (first < count && bytes >= parts[first].bytes) {
    bytes -= parts[first].bytes;
    first++;
  }
  if (first < count) {
    parts[first].data = static_cast<uint8_t*>(parts[first].data) + bytes;
    parts[first].bytes -= bytes;
  }
  return first;
}

}  // namespace gpupool::wire
