#define GPUPOOL_CUDA_ABI_EXACT 1
#include "client/copies.h"

#include <string.h>

#include <algorithm>
#include <mutex>
#include <unordered_set>
#include <vector>

namespace gpupool::client {
namespace {

using carriers::Part;

constexpr uint64_t kSegmentBytes = 512 * 1024;  // small enough that the worker can start early
constexpr uint64_t kFrameBulkBytes = 2 * kSegmentBytes;  // so that the credit is granted steadily
constexpr uint64_t kInlineBytes = 4096;  // below it, copying into the batch beats another segment

int split(uint8_t* at, uint64_t bytes, Part* parts) {
  int count = 0;
  while (bytes > 0) {
    const uint64_t piece = std::min(bytes, kSegmentBytes);
    parts[count++] = {at, piece};
    at += piece;
    bytes -= piece;
  }
  return count;
}

void send_to_device(Context* context, uint64_t device, uint64_t pitch, uint64_t width,
                    uint8_t* data, uint64_t bytes, wire::Handle stream, uint32_t flags) {
  wire::CopyToDevice body{device, bytes, pitch, width, stream, flags, 0};
  Channel& channel = channel_of(context);
  if (bytes <= kInlineBytes) {
    body.flags |= wire::kCopyInline;
    Channel::Post post(channel, op(Operation::kMemcpyHtoDAsyncV2), context->wire_id(),
                       sizeof body + wire::align8(bytes));
    wire::Encoder encoder = post.encoder();
    encoder.put(body);
    encoder.raw(data, bytes);
    return;
  }
  Part parts[wire::kMaxBulkSegments];
  const int count = split(data, bytes, parts);
  channel.send_bulk(
      op(Operation::kMemcpyHtoDAsyncV2), context->wire_id(), sizeof body,
      [&](wire::Encoder& encoder) { encoder.put(body); }, parts, count);
}

// A copy into the program's memory that nobody waits for.
struct LaterCopy : PendingCall {
  Context* context = nullptr;
  uint64_t host = 0, bytes = 0;
};

// Those that are outstanding.
struct LaterCopies {
  std::mutex lock;
  std::unordered_set<const LaterCopy*> all;
  std::atomic<size_t> count{0};
};
LaterCopies& later_copies() {
  static auto* const instance = new LaterCopies;
  return *instance;
}

void copy_landed(PendingCall* call) {
  auto* copy = static_cast<LaterCopy*>(call);
  CUresult result = copy->status;
  if (result == CUDA_SUCCESS && copy->bulk_bytes != copy->bytes) result = CUDA_ERROR_UNKNOWN;
  if (is_sticky(result)) {
    settle(copy->context, result);
  } else if (result != CUDA_SUCCESS) {
    int none = 0;
    copy->context->refused.compare_exchange_strong(none, result);
  }
  {
    std::lock_guard guard(later_copies().lock);
    later_copies().all.erase(copy);
    later_copies().count.store(later_copies().all.size(), std::memory_order_release);
  }
  delete copy;
}

}  // namespace

CUresult copy_from_device_later(Context* context, const HostRows& rows, wire::Handle stream) {
  auto* copy = new LaterCopy;
  copy->context = context;
  copy->host = rows.host;
  copy->bytes = rows.width;
  copy->bulk_to = reinterpret_cast<uint8_t*>(rows.host);
  copy->bulk_room = rows.width;
  copy->landed = copy_landed;
  {
    std::lock_guard guard(later_copies().lock);
    later_copies().all.insert(copy);
    later_copies().count.store(later_copies().all.size(), std::memory_order_release);
  }
  const wire::CopyFromDevice body{rows.device, rows.width, 0, rows.width, stream, 0};
  channel_of(context).post_call(
      op(Operation::kMemcpyDtoHAsyncV2), context->wire_id(), sizeof body,
      [&](wire::Encoder& encoder) { encoder.put(body); }, copy);
  return CUDA_SUCCESS;
}

CUresult copy_to_device_later(Context* context, const HostRows& rows, wire::Handle stream) {
  for (uint64_t done = 0; done < rows.width;) {
    const uint64_t piece = std::min<uint64_t>(rows.width - done, wire::kMaxBulkSegment);
    const uint32_t number = context->device->host_calls.add_source(
        context, reinterpret_cast<const void*>(rows.host + done), piece);
    Channel::Post post(channel_of(context), op(Operation::kPulledCopy), context->wire_id(),
                       sizeof(wire::CopyToDevice));
    post.encoder().put(wire::CopyToDevice{rows.device + done, piece, 0, piece, stream, 0, number});
    done += piece;
  }
  return CUDA_SUCCESS;
}

bool host_memory_changes(uint64_t host, uint64_t bytes) {
  if (HostCalls::any_outstanding()) return true;
  LaterCopies& copies = later_copies();
  if (copies.count.load(std::memory_order_acquire) == 0) return false;
  std::lock_guard guard(copies.lock);
  return std::any_of(copies.all.begin(), copies.all.end(), [&](const LaterCopy* copy) {
    return copy->host < host + bytes && host < copy->host + copy->bytes;
  });
}

bool host_memory_in_use() {
  return HostCalls::any_outstanding() || later_copies().count.load(std::memory_order_acquire) != 0;
}

CUresult copy_to_device(Context* context, const HostRows& rows, wire::Handle stream,
                        bool synchronous) {
  const uint32_t flags = synchronous ? uint32_t{wire::kCopySynchronous} : 0;
  Channel& channel = channel_of(context);
  auto* host = reinterpret_cast<uint8_t*>(rows.host);
  const bool one_row =
      rows.height == 1 || (rows.host_pitch == rows.width && rows.device_pitch == rows.width);
  if (one_row) {
    const uint64_t total = rows.width * rows.height;
    for (uint64_t done = 0; done < total && !channel.lost();) {
      const uint64_t piece = std::min(total - done, kFrameBulkBytes);
      send_to_device(context, rows.device + done, 0, piece, host + done, piece, stream, flags);
      done += piece;
    }
  } else {
    // Rows travel packed: as many as fit into a frame, or a long row in pieces.
    std::vector<uint8_t> packed;
    for (uint64_t row = 0; row < rows.height && !channel.lost();) {
      if (rows.width > kFrameBulkBytes) {
        const HostRows one{rows.host + row * rows.host_pitch,
                           0,
                           rows.device + row * rows.device_pitch,
                           0,
                           rows.width,
                           1};
        const CUresult result = copy_to_device(context, one, stream, synchronous);
        if (result != CUDA_SUCCESS) return result;
        row++;
        continue;
      }
      const uint64_t count = std::min(rows.height - row, kFrameBulkBytes / rows.width);
      packed.resize(count * rows.width);
      for (uint64_t i = 0; i < count; i++) {
        memcpy(packed.data() + i * rows.width, host + (row + i) * rows.host_pitch, rows.width);
      }
      send_to_device(context, rows.device + row * rows.device_pitch, rows.device_pitch, rows.width,
                     packed.data(), packed.size(), stream, flags);
      row += count;
    }
  }
  return channel.lost() ? CUDA_ERROR_DEVICE_UNAVAILABLE : CUDA_SUCCESS;
}

CUresult copy_from_device(Context* context, const HostRows& rows, wire::Handle stream) {
  const uint64_t total = rows.width * rows.height;
  auto* host = reinterpret_cast<uint8_t*>(rows.host);
  const bool host_packed = rows.height == 1 || rows.host_pitch == rows.width;
  const bool device_packed = rows.height == 1 || rows.device_pitch == rows.width;
  std::vector<uint8_t> packed;
  PendingCall call;
  call.bulk_room = total;
  if (host_packed) {
    call.bulk_to = host;
  } else {
    packed.resize(total);
    call.bulk_to = packed.data();
  }
  const wire::CopyFromDevice body{
      rows.device, total, device_packed ? 0 : rows.device_pitch, device_packed ? total : rows.width,
      stream,      0};
  CUresult result = channel_of(context).call(
      op(Operation::kMemcpyDtoHAsyncV2), context->wire_id(), sizeof body,
      [&](wire::Encoder& encoder) { encoder.put(body); }, &call);
  if (result == CUDA_SUCCESS && call.bulk_bytes != total) result = CUDA_ERROR_UNKNOWN;
  if (result == CUDA_SUCCESS && !host_packed) {
    for (uint64_t row = 0; row < rows.height; row++) {
      memcpy(host + row * rows.host_pitch, packed.data() + row * rows.width, rows.width);
    }
  }
  return settle(context, result);
}

CUresult copy_on_device(Context* context, const wire::CopyRows& rows) {
  Channel::Post post(channel_of(context), op(Operation::kMemcpy2DAsyncV2), context->wire_id(),
                     sizeof rows);
  post.encoder().put(rows);
  return CUDA_SUCCESS;
}

}  // namespace gpupool::client
