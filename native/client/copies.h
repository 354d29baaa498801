// Copies between host and device, in pieces that fit into frames.
#pragma once

#include "client/state.h"

namespace gpupool::client {

// Rows in host memory and on the device; one row of `width` bytes where `height` is 1.
struct HostRows {
  uint64_t host = 0, host_pitch = 0;
  uint64_t device = 0, device_pitch = 0;
  uint64_t width = 0, height = 1;
};

// The data have left when this returns. `synchronous`: later work on any stream comes after it.
CUresult copy_to_device(Context* context, const HostRows& rows, wire::Handle stream,
                        bool synchronous);
// The data are there when this returns, behind everything in the stream.
CUresult copy_from_device(Context* context, const HostRows& rows, wire::Handle stream);
CUresult copy_on_device(Context* context, const wire::CopyRows& rows);

}  // namespace gpupool::client
