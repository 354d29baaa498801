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
// The data come when the stream gets there; the memory has to stay until then. One row.
CUresult copy_from_device_later(Context* context, const HostRows& rows, wire::Handle stream);
// The data are read when the stream gets there. One row.
CUresult copy_to_device_later(Context* context, const HostRows& rows, wire::Handle stream);
// True if something that was submitted may still write this memory of the program: a copy from a
// device, or one of its functions that a stream calls.
bool host_memory_changes(uint64_t host, uint64_t bytes);
// True if any copy of the two kinds above, or a function, is outstanding.
bool host_memory_in_use();
CUresult copy_on_device(Context* context, const wire::CopyRows& rows);

}  // namespace gpupool::client
