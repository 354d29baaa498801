// Functions of the program that a stream calls.
#define GPUPOOL_CUDA_ABI_EXACT 1
#include "api/cuda_abi.h"
#include "client/state.h"
#include "graphs/capture.h"

using namespace gpupool;          // NOLINT: a file of entry points
using namespace gpupool::client;  // NOLINT

namespace {

CUresult launch(Context* context, wire::Handle stream, uint32_t number, bool with_status) {
  Channel::Post post(channel_of(context), op(Operation::kLaunchHostFunc), context->wire_id(),
                     sizeof(wire::HostFunctionLaunch));
  post.encoder().put(wire::HostFunctionLaunch{stream, number, with_status ? 1u : 0u});
  return CUDA_SUCCESS;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void* data) {
  Context* context;
  if (const CUresult e = enter(&context)) return e;
  if (function == nullptr) return CUDA_ERROR_INVALID_VALUE;
  GPUPOOL_CAPTURE(capture_host(stream, function, data, &capture_result));
  wire::Handle on_wire;
  if (const CUresult e = resolve_stream(context, stream, &on_wire)) return e;
  return launch(context, on_wire, context->device->host_calls.add_function(context, function, data),
                false);
}

CUresult cuStreamAddCallback(CUstream stream, CUstreamCallback callback, void* data,
                             unsigned int flags) {
  Context* context;
  if (const CUresult e = enter(&context)) return e;
  if (callback == nullptr || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  GPUPOOL_CAPTURE(refuse_capture(stream, &capture_result));
  wire::Handle on_wire;
  if (const CUresult e = resolve_stream(context, stream, &on_wire)) return e;
  return launch(context, on_wire,
                context->device->host_calls.add_callback(context, stream, callback, data), true);
}

}  // extern "C"
#pragma GCC visibility pop
