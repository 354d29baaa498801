// Streams, events, host functions.
#include "graphs/capture.h"
#include "simgpu/driver/context.h"

using namespace gpupool::simgpu;
using gpupool::graphs::capture_record;
using gpupool::graphs::capture_wait;
using gpupool::graphs::watching;

namespace {

// A stream by its handle alone; the default streams are those of the current context.
CUresult named_stream(CUstream handle, std::shared_ptr<Stream>* stream) {
  GPUPOOL_CURRENT(context);
  return find_stream(handle, context, stream);
}

CUresult create(CUstream* out, unsigned flags, int priority) {
  GPUPOOL_CURRENT(context);
  if (!out || flags & ~unsigned(CU_STREAM_NON_BLOCKING)) return CUDA_ERROR_INVALID_VALUE;
  if (priority > 0) priority = 0;
  if (priority < -5) priority = -5;
  *out = driver().streams.add<CUstream>(context->new_stream(flags, priority));
  return CUDA_SUCCESS;
}

CUresult record(CUevent handle, CUstream stream_handle, unsigned flags) {
  GPUPOOL_CURRENT(context);
  if (flags & ~1u) return CUDA_ERROR_INVALID_VALUE;
  CUresult captured;
  if (watching() && capture_record(stream_handle, handle, flags, &captured)) return captured;
  std::shared_ptr<Stream> stream;
  GPUPOOL_TRY(find_stream(stream_handle, context, &stream));
  auto event = driver().events.get(handle);
  if (!event || event->context != stream->context) return CUDA_ERROR_INVALID_HANDLE;
  auto point = std::make_shared<RecordPoint>();
  {
    std::lock_guard lock(event->mutex);
    event->last = point;
  }
  stream->context->record(stream, point);
  return CUDA_SUCCESS;
}

std::shared_ptr<RecordPoint> last_point(Event& event) {
  std::lock_guard lock(event.mutex);
  return event.last;
}

CUresult find_event(CUevent handle, std::shared_ptr<Event>* event) {
  GPUPOOL_CURRENT(context);
  *event = driver().events.get(handle);
  return *event ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

}  // namespace

GPUPOOL_API cuStreamCreate(CUstream* out, unsigned int flags) { return create(out, flags, 0); }

GPUPOOL_API cuStreamCreateWithPriority(CUstream* out, unsigned int flags, int priority) {
  return create(out, flags, priority);
}

GPUPOOL_API cuStreamDestroy_v2(CUstream handle) {
  GPUPOOL_TRY(driver_status());
  auto stream = driver().streams.take(handle);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  gpupool::graphs::forget_stream(reinterpret_cast<uint64_t>(stream.get()));
  stream->context->retire(stream);
  return CUDA_SUCCESS;
}

GPUPOOL_API cuStreamSynchronize(CUstream handle) {
  GPUPOOL_CAPTURE_CHECK(check_stream_query(handle));
  std::shared_ptr<Stream> stream;
  GPUPOOL_TRY(named_stream(handle, &stream));
  stream->wait_all();
  stream->context->flush_output();
  return stream->context->status();
}

GPUPOOL_API cuStreamQuery(CUstream handle) {
  GPUPOOL_CAPTURE_CHECK(check_stream_query(handle));
  std::shared_ptr<Stream> stream;
  GPUPOOL_TRY(named_stream(handle, &stream));
  GPUPOOL_TRY(stream->context->status());
  return stream->idle() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

GPUPOOL_API cuStreamGetPriority(CUstream handle, int* priority) {
  std::shared_ptr<Stream> stream;
  GPUPOOL_TRY(named_stream(handle, &stream));
  if (!priority) return CUDA_ERROR_INVALID_VALUE;
  *priority = stream->priority;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuStreamGetFlags(CUstream handle, unsigned int* flags) {
  std::shared_ptr<Stream> stream;
  GPUPOOL_TRY(named_stream(handle, &stream));
  if (!flags) return CUDA_ERROR_INVALID_VALUE;
  *flags = stream->flags;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuStreamGetId(CUstream handle, unsigned long long* id) {
  std::shared_ptr<Stream> stream;
  GPUPOOL_TRY(named_stream(handle, &stream));
  if (!id) return CUDA_ERROR_INVALID_VALUE;
  *id = stream->id;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuStreamGetCtx(CUstream handle, CUcontext* context) {
  std::shared_ptr<Stream> stream;
  GPUPOOL_TRY(named_stream(handle, &stream));
  if (!context) return CUDA_ERROR_INVALID_VALUE;
  *context = handle_of(stream->context);
  return CUDA_SUCCESS;
}

GPUPOOL_API cuStreamGetDevice(CUstream handle, CUdevice* device) {
  std::shared_ptr<Stream> stream;
  GPUPOOL_TRY(named_stream(handle, &stream));
  if (!device) return CUDA_ERROR_INVALID_VALUE;
  *device = stream->context->device->ordinal;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuStreamWaitEvent(CUstream handle, CUevent event_handle, unsigned int flags) {
  if (flags & ~1u) return CUDA_ERROR_INVALID_VALUE;
  std::shared_ptr<Stream> stream;
  GPUPOOL_TRY(named_stream(handle, &stream));
  CUresult captured;
  if (watching() && capture_wait(handle, event_handle, flags, &captured)) return captured;
  auto event = driver().events.get(event_handle);
  if (!event) return CUDA_ERROR_INVALID_HANDLE;
  auto point = last_point(*event);
  if (point && !point->done()) stream->context->submit(stream, [point] { point->wait(); });
  return CUDA_SUCCESS;
}

GPUPOOL_API cuStreamAddCallback(CUstream handle, CUstreamCallback callback, void* data,
                                unsigned int flags) {
  if (flags || !callback) return CUDA_ERROR_INVALID_VALUE;
  std::shared_ptr<Stream> stream;
  GPUPOOL_TRY(named_stream(handle, &stream));
  GPUPOOL_CAPTURE(refuse_capture(handle, &capture_result));
  Context* context = stream->context;
  context->submit(
      stream,
      [=] {
        const CUresult status = context->status();
        call_host_function([=] { callback(handle, status, data); });
      },
      true);
  return CUDA_SUCCESS;
}

GPUPOOL_API cuLaunchHostFunc(CUstream handle, CUhostFn function, void* data) {
  if (!function) return CUDA_ERROR_INVALID_VALUE;
  std::shared_ptr<Stream> stream;
  GPUPOOL_TRY(named_stream(handle, &stream));
  GPUPOOL_CAPTURE(capture_host(handle, function, data, &capture_result));
  Context* context = stream->context;
  context->submit(
      stream,
      [=] {
        if (context->status() != CUDA_SUCCESS) return;  // not called after an error
        call_host_function([=] { function(data); });
      },
      true);
  return CUDA_SUCCESS;
}

GPUPOOL_API cuEventCreate(CUevent* out, unsigned int flags) {
  GPUPOOL_CURRENT(context);
  if (!out || flags & ~7u) return CUDA_ERROR_INVALID_VALUE;
  if (flags & CU_EVENT_INTERPROCESS) {
    return flags & CU_EVENT_DISABLE_TIMING ? CUDA_ERROR_NOT_SUPPORTED : CUDA_ERROR_INVALID_VALUE;
  }
  auto event = std::make_shared<Event>();
  event->context = context;
  event->flags = flags;
  *out = driver().events.add<CUevent>(std::move(event));
  return CUDA_SUCCESS;
}

GPUPOOL_API cuEventDestroy_v2(CUevent handle) {
  GPUPOOL_TRY(driver_status());
  gpupool::graphs::forget_event(handle);
  return driver().events.take(handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

GPUPOOL_API cuEventRecord(CUevent event, CUstream stream) { return record(event, stream, 0); }

GPUPOOL_API cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned int flags) {
  return record(event, stream, flags);
}

GPUPOOL_API cuEventQuery(CUevent handle) {
  if (watching()) GPUPOOL_TRY(gpupool::graphs::check_event_query(handle));
  std::shared_ptr<Event> event;
  GPUPOOL_TRY(find_event(handle, &event));
  auto point = last_point(*event);
  if (point && !point->done()) return CUDA_ERROR_NOT_READY;
  return event->context->status();
}

GPUPOOL_API cuEventSynchronize(CUevent handle) {
  if (watching()) GPUPOOL_TRY(gpupool::graphs::check_event_query(handle));
  std::shared_ptr<Event> event;
  GPUPOOL_TRY(find_event(handle, &event));
  if (auto point = last_point(*event)) point->wait();
  event->context->flush_output();
  return event->context->status();
}

GPUPOOL_API cuEventElapsedTime_v2(float* milliseconds, CUevent start_handle, CUevent end_handle) {
  if (watching()) {
    GPUPOOL_TRY(gpupool::graphs::check_event_query(start_handle));
    GPUPOOL_TRY(gpupool::graphs::check_event_query(end_handle));
  }
  std::shared_ptr<Event> start, end;
  GPUPOOL_TRY(find_event(start_handle, &start));
  GPUPOOL_TRY(find_event(end_handle, &end));
  if (!milliseconds) return CUDA_ERROR_INVALID_VALUE;
  auto from = last_point(*start), to = last_point(*end);
  if (!from || !to || start->context != end->context ||
      (start->flags | end->flags) & CU_EVENT_DISABLE_TIMING) {
    return CUDA_ERROR_INVALID_HANDLE;
  }
  if (!from->done() || !to->done()) return CUDA_ERROR_NOT_READY;
  *milliseconds = float(double(int64_t(to->time_ns() - from->time_ns())) / 1e6);
  return CUDA_SUCCESS;
}

GPUPOOL_API cuProfilerStart() {
  GPUPOOL_CURRENT(context);
  return CUDA_SUCCESS;
}

GPUPOOL_API cuProfilerStop() {
  GPUPOOL_CURRENT(context);
  return CUDA_SUCCESS;
}
