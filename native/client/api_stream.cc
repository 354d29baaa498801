// Streams and events. Creating, recording, waiting on the device and destroying are not answered.
#define GPUPOOL_CUDA_ABI_EXACT 1
#include <string.h>

#include <algorithm>

#include "api/cuda_abi.h"
#include "client/pools.h"
#include "client/state.h"
#include "graphs/capture.h"

using namespace gpupool;          // NOLINT: a file of entry points
using namespace gpupool::client;  // NOLINT

#define ENTER()     \
  Context* context; \
  if (const CUresult e_ = enter(&context)) return e_;
#define REQUIRE(condition) \
  if (!(condition)) return CUDA_ERROR_INVALID_VALUE;
#define STREAM(stream)  \
  wire::Handle on_wire; \
  Stream* object;       \
  if (const CUresult e_ = resolve_stream(context, stream, &on_wire, &object)) return e_;

namespace {

std::atomic<uint64_t> next_stream_id{16};

CUresult create_stream(CUstream* out, unsigned flags, int priority) {
  ENTER();
  REQUIRE(out != nullptr && (flags & ~1u) == 0);
  // A priority outside the range is clamped to it.
  const auto& snapshot = context->device->snapshot;
  priority = std::min(std::max(priority, snapshot.stream_priority_greatest),
                      snapshot.stream_priority_least);
  Stream* stream = Process::get().tables.streams.allocate();
  if (stream == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  stream->context = context;
  stream->flags = flags;
  stream->priority = priority;
  stream->id = next_stream_id.fetch_add(1);
  stream->per_thread = false;
  {
    Channel::Post post(channel_of(context), op(Operation::kStreamCreateWithPriority),
                       context->wire_id(), sizeof(wire::StreamCreate));
    post.encoder().put(wire::StreamCreate{stream->wire, flags, priority});
  }
  Process::get().tables.streams.publish(stream);
  *out = reinterpret_cast<CUstream>(stream->handle);
  return CUDA_SUCCESS;
}

CUresult ask(Context* context, Operation operation, wire::Handle handle) {
  PendingCall call;
  const CUresult result = channel_of(context).call(
      op(operation), context->wire_id(), sizeof handle,
      [handle](wire::Encoder& encoder) { encoder.handle(handle); }, &call);
  return settle(context, result);
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

CUresult cuStreamCreate(CUstream* out, unsigned int flags) { return create_stream(out, flags, 0); }

CUresult cuStreamCreateWithPriority(CUstream* out, unsigned int flags, int priority) {
  return create_stream(out, flags, priority);
}

CUresult cuStreamDestroy_v2(CUstream stream) {
  ENTER();
  const auto value = reinterpret_cast<uint64_t>(stream);
  if (value <= 2) return CUDA_ERROR_INVALID_HANDLE;
  Stream* object = Process::get().tables.streams.find(value);
  if (object == nullptr || object->per_thread) return CUDA_ERROR_INVALID_HANDLE;
  const wire::Handle handle = object->wire;
  Context* owner = object->context;
  graphs::forget_stream(object->handle);
  if (!Process::get().tables.streams.retire(object)) return CUDA_ERROR_INVALID_HANDLE;
  Channel::Post post(channel_of(owner), op(Operation::kStreamDestroyV2), owner->wire_id(),
                     sizeof handle);
  post.encoder().handle(handle);
  return CUDA_SUCCESS;
}

CUresult cuStreamSynchronize(CUstream stream) {
  ENTER();
  STREAM(stream);
  GPUPOOL_CAPTURE_CHECK(check_stream_query(stream));
  const uint64_t time = pool_time();
  const CUresult result = ask(context, Operation::kStreamSynchronize, on_wire);
  if (result == CUDA_SUCCESS) pool_observed(context, object, time);
  return result;
}

CUresult cuStreamQuery(CUstream stream) {
  ENTER();
  STREAM(stream);
  GPUPOOL_CAPTURE_CHECK(check_stream_query(stream));
  const uint64_t time = pool_time();
  const CUresult result = ask(context, Operation::kStreamQuery, on_wire);
  if (result == CUDA_SUCCESS) pool_observed(context, object, time);
  return result;
}

CUresult cuStreamGetPriority(CUstream stream, int* priority) {
  ENTER();
  REQUIRE(priority != nullptr);
  STREAM(stream);
  *priority = object != nullptr ? object->priority : 0;
  return CUDA_SUCCESS;
}

CUresult cuStreamGetFlags(CUstream stream, unsigned int* flags) {
  ENTER();
  REQUIRE(flags != nullptr);
  STREAM(stream);
  *flags = object != nullptr ? object->flags : 0;
  return CUDA_SUCCESS;
}

CUresult cuStreamGetId(CUstream stream, unsigned long long* id) {
  ENTER();
  REQUIRE(id != nullptr);
  STREAM(stream);
  if (object != nullptr && object->id == 0) object->id = next_stream_id.fetch_add(1);
  *id = object != nullptr ? object->id : 1;
  return CUDA_SUCCESS;
}

CUresult cuStreamGetCtx(CUstream stream, CUcontext* out) {
  ENTER();
  REQUIRE(out != nullptr);
  STREAM(stream);
  *out = reinterpret_cast<CUcontext>(object != nullptr ? object->context->handle : context->handle);
  return CUDA_SUCCESS;
}

CUresult cuStreamGetDevice(CUstream stream, CUdevice* out) {
  ENTER();
  REQUIRE(out != nullptr);
  STREAM(stream);
  *out = (object != nullptr ? object->context : context)->device->ordinal;
  return CUDA_SUCCESS;
}

CUresult cuEventCreate(CUevent* out, unsigned int flags) {
  ENTER();
  REQUIRE(out != nullptr);
  REQUIRE((flags & ~(CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS)) ==
          0);
  if (flags & CU_EVENT_INTERPROCESS) return CUDA_ERROR_NOT_SUPPORTED;
  Event* event = Process::get().tables.events.allocate();
  if (event == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  event->context = context;
  event->flags = flags;
  {
    Channel::Post post(channel_of(context), op(Operation::kEventCreate), context->wire_id(),
                       sizeof(wire::Handle) + 8);
    wire::Encoder encoder = post.encoder();
    encoder.handle(event->wire);
    encoder.scalar(flags);
  }
  Process::get().tables.events.publish(event);
  *out = reinterpret_cast<CUevent>(event->handle);
  return CUDA_SUCCESS;
}

CUresult cuEventDestroy_v2(CUevent handle) {
  ENTER();
  Event* event;
  if (const CUresult e = resolve_event(handle, &event)) return e;
  const wire::Handle on_wire = event->wire;
  Context* owner = event->context;
  graphs::forget_event(handle);
  if (!Process::get().tables.events.retire(event)) return CUDA_ERROR_INVALID_HANDLE;
  Channel::Post post(channel_of(owner), op(Operation::kEventDestroyV2), owner->wire_id(),
                     sizeof on_wire);
  post.encoder().handle(on_wire);
  return CUDA_SUCCESS;
}

CUresult cuEventSynchronize(CUevent handle) {
  ENTER();
  Event* event;
  if (const CUresult e = resolve_event(handle, &event)) return e;
  GPUPOOL_CAPTURE_EVENT(refuse_events(handle, handle, &capture_result));
  return ask(event->context, Operation::kEventSynchronize, event->wire);
}

CUresult cuEventQuery(CUevent handle) {
  ENTER();
  Event* event;
  if (const CUresult e = resolve_event(handle, &event)) return e;
  GPUPOOL_CAPTURE_EVENT(refuse_events(handle, handle, &capture_result));
  return ask(event->context, Operation::kEventQuery, event->wire);
}

}  // extern "C"
#pragma GCC visibility pop
