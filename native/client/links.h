// The linker over the wire, and sending data that may be larger than a frame.
#pragma once

#include <algorithm>
#include <vector>

#include "client/modules.h"

namespace gpupool::client {

// Sends a command's data in as many commands as it takes. `fill(Encoder&, more)` writes the body,
// which says whether more follows; the last command waits for the answer.
template <typename Fill>
CUresult send_in_pieces(Context* context, uint16_t operation, const uint8_t* data, uint64_t bytes,
                        size_t body_bytes, Fill&& fill, PendingCall* call) {
  constexpr uint64_t kSegment = 512 * 1024;
  constexpr int kSegments = 8;
  Channel& channel = channel_of(context);
  for (uint64_t done = 0;;) {
    carriers::Part parts[kSegments];
    int count = 0;
    while (count < kSegments && done < bytes) {
      const uint64_t piece = std::min(bytes - done, kSegment);
      parts[count++] = {const_cast<uint8_t*>(data) + done, piece};
      done += piece;
    }
    if (done == bytes) {
      return channel.call(
          operation, context->wire_id(), body_bytes,
          [&](wire::Encoder& encoder) { fill(encoder, false); }, call, parts, count);
    }
    channel.send_bulk(
        operation, context->wire_id(), body_bytes,
        [&](wire::Encoder& encoder) { fill(encoder, true); }, parts, count);
    if (channel.lost()) return CUDA_ERROR_DEVICE_UNAVAILABLE;
  }
}

// Links pieces of code into one image, as -rdc=true programs need it.
CUresult link_pieces(Context* context, const std::vector<Code::Piece>& pieces,
                     const JitOptions& options, std::vector<uint8_t>* image);

}  // namespace gpupool::client
