#include "relay/forward.h"

#include <algorithm>

namespace gpupool::relay {
namespace {

using carriers::Moved;
using carriers::Part;
using carriers::Status;

constexpr size_t kPiece = 64 * 1024;
constexpr int64_t kWaitUs = 1000;

}  // namespace

Forwarder::Forwarder(carriers::Carrier& from, uint32_t from_epoch, carriers::Carrier& to,
                     uint32_t to_epoch, std::function<void()> idle)
    : from_(from),
      to_(to),
      to_epoch_(to_epoch),
      idle_(std::move(idle)),
      reader_(from, from_epoch),
      piece_(new uint8_t[kPiece]) {}

Forwarder::End Forwarder::run() {
  for (;;) {
    switch (reader_.next(true)) {
      case wire::FrameReader::Result::kFrame:
        if (forward()) continue;
        if (!cut_off_) return End::kToClosed;
        problem_ = from_.broken() != nullptr ? from_.broken() : "it ended in the middle of a frame";
        return End::kBadFrame;
      case wire::FrameReader::Result::kClosed:
        return End::kFromClosed;
      case wire::FrameReader::Result::kBad:
        problem_ = reader_.reason();
        return End::kBadFrame;
      case wire::FrameReader::Result::kBlocked:
        continue;
    }
  }
}

bool Forwarder::write(Part* parts, int count) {
  int first = 0;
  while (first < count) {
    const Moved moved = to_.write(parts + first, count - first, !idle_);
    if (moved.status == Status::kClosed) return false;
    if (moved.status == Status::kBlocked) {
      if (!idle_) continue;
      idle_();
      to_.wait(carriers::kWritable, kWaitUs);
      continue;
    }
    size_t bytes = moved.bytes;
    while (first < count && bytes >= parts[first].bytes) bytes -= parts[first++].bytes;
    if (first == count) break;
    parts[first].data = static_cast<uint8_t*>(parts[first].data) + bytes;
    parts[first].bytes -= bytes;
  }
  return true;
}

bool Forwarder::forward() {
  wire::FrameHeader header = reader_.header();
  header.epoch = to_epoch_;
  uint32_t segments[wire::kMaxBulkSegments] = {};
  std::copy_n(reader_.segments(), header.bulk_count, segments);
  Part parts[3] = {{&header, sizeof header},
                   {segments, wire::align8(size_t{header.bulk_count} * 4)},
                   {const_cast<uint8_t*>(reader_.body()), header.body_bytes}};
  Part filled[3];
  int count = 0;
  for (const Part& part : parts) {
    if (part.bytes > 0) filled[count++] = part;
  }
  between_ = false;
  if (reader_.bulk_left() > 0) to_.begin_bulk_out();
  if (!write(filled, count) || !forward_bulk()) return false;
  sequence_ = header.sequence;
  between_ = true;
  return true;
}

bool Forwarder::forward_bulk() {
  while (reader_.bulk_left() > 0) {
    size_t bytes = std::min<uint64_t>(reader_.bulk_left(), kPiece);
    if (from_.bulk_apart()) {
      // From where they lie.
      bytes = std::min(bytes, from_.bulk_run_in());
      uint64_t end = 0;
      if (bytes > 0 && reader_.wait_for_bulk(bytes)) {
        if (const uint8_t* at = reader_.lend_bulk(bytes, &end)) {
          Part part{const_cast<uint8_t*>(at), bytes, true};
          const bool written = write(&part, 1);
          from_.release_bulk(end, true);
          if (!written) return false;
          continue;
        }
      }
      if (bytes == 0) bytes = std::min<uint64_t>(reader_.bulk_left(), kPiece);
    }
    const Moved moved = reader_.read_bulk(piece_.get(), bytes, true);
    if (moved.status == Status::kClosed) return cut_off_ = true, false;
    if (moved.status != Status::kOk) continue;
    Part part{piece_.get(), moved.bytes, true};
    if (!write(&part, 1)) return false;
  }
  return true;
}

}  // namespace gpupool::relay
