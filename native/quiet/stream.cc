// Streams, events and launches. Everything is done when it is called, so nothing ever waits.
#include <time.h>

#include <atomic>

#include "frontdoor/default_stream.h"
#include "quiet/quiet.h"

using namespace gpupool::quiet;

namespace {

std::atomic<unsigned long long> g_next_stream{3};

bool is_stream(CUstream stream) {
  return stream == nullptr || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD ||
         is_valid(stream);
}

bool is_object(CUstream stream) {
  return stream != nullptr && stream != CU_STREAM_LEGACY && stream != CU_STREAM_PER_THREAD;
}

int64_t now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * int64_t{1000000000} + time.tv_nsec;
}

CUresult launch(CUfunction f, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by,
                unsigned bz, CUstream stream) {
  if (!is_valid(f) || !is_stream(stream)) return CUDA_ERROR_INVALID_HANDLE;
  if (x == 0 || y == 0 || z == 0 || bx == 0 || by == 0 || bz == 0) return CUDA_ERROR_INVALID_VALUE;
  return CUDA_SUCCESS;
}

}  // namespace

GPUPOOL_API cuStreamCreateWithPriority(CUstream* phStream, unsigned int flags, int priority) {
  if (current_context() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  if (phStream == nullptr) return CUDA_ERROR_INVALID_VALUE;
  auto* stream = new CUstream_st;
  stream->flags = flags;
  stream->priority = priority;
  stream->context = current_context();
  stream->id = g_next_stream++;
  *phStream = stream;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuStreamCreate(CUstream* phStream, unsigned int Flags) {
  return cuStreamCreateWithPriority(phStream, Flags, 0);
}

GPUPOOL_API cuStreamDestroy_v2(CUstream hStream) {
  if (!is_object(hStream) || !is_valid(hStream)) return CUDA_ERROR_INVALID_HANDLE;
  hStream->magic = 0;
  delete hStream;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuStreamSynchronize(CUstream hStream) {
  return is_stream(hStream) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}
GPUPOOL_API cuStreamQuery(CUstream hStream) {
  return is_stream(hStream) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

GPUPOOL_API cuStreamWaitEvent(CUstream hStream, CUevent hEvent, unsigned int) {
  return is_stream(hStream) && is_valid(hEvent) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

GPUPOOL_API cuStreamGetFlags(CUstream hStream, unsigned int* flags) {
  if (!is_stream(hStream)) return CUDA_ERROR_INVALID_HANDLE;
  *flags = is_object(hStream) ? hStream->flags : 0;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuStreamGetPriority(CUstream hStream, int* priority) {
  if (!is_stream(hStream)) return CUDA_ERROR_INVALID_HANDLE;
  *priority = is_object(hStream) ? hStream->priority : 0;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuStreamGetId(CUstream hStream, unsigned long long* streamId) {
  if (!is_stream(hStream)) return CUDA_ERROR_INVALID_HANDLE;
  hStream = gpupool::frontdoor::resolve_stream(hStream);
  *streamId = is_object(hStream) ? hStream->id : reinterpret_cast<unsigned long long>(hStream);
  return CUDA_SUCCESS;
}

GPUPOOL_API cuStreamGetCtx(CUstream hStream, CUcontext* pctx) {
  if (!is_stream(hStream)) return CUDA_ERROR_INVALID_HANDLE;
  *pctx = is_object(hStream) ? hStream->context : current_context();
  return *pctx != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

GPUPOOL_API cuStreamGetDevice(CUstream hStream, CUdevice* device) {
  CUcontext context;
  CUresult error = cuStreamGetCtx(hStream, &context);
  if (error == CUDA_SUCCESS) *device = context->device;
  return error;
}

GPUPOOL_API cuStreamIsCapturing(CUstream hStream, CUstreamCaptureStatus* captureStatus) {
  if (!is_stream(hStream)) return CUDA_ERROR_INVALID_HANDLE;
  *captureStatus = CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuStreamGetCaptureInfo_v2(CUstream hStream, CUstreamCaptureStatus* captureStatus_out,
                                      cuuint64_t* id_out, CUgraph*, const CUgraphNode**, size_t*) {
  if (id_out != nullptr) *id_out = 0;
  return cuStreamIsCapturing(hStream, captureStatus_out);
}

GPUPOOL_API cuStreamGetCaptureInfo_v3(CUstream hStream, CUstreamCaptureStatus* captureStatus_out,
                                      cuuint64_t* id_out, CUgraph*, const CUgraphNode**,
                                      const CUgraphEdgeData**, size_t*) {
  if (id_out != nullptr) *id_out = 0;
  return cuStreamIsCapturing(hStream, captureStatus_out);
}

GPUPOOL_API cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  return mode != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

GPUPOOL_API cuLaunchHostFunc(CUstream hStream, CUhostFn fn, void* userData) {
  if (!is_stream(hStream)) return CUDA_ERROR_INVALID_HANDLE;
  if (fn == nullptr) return CUDA_ERROR_INVALID_VALUE;
  fn(userData);
  return CUDA_SUCCESS;
}

GPUPOOL_API cuStreamAddCallback(CUstream hStream, CUstreamCallback callback, void* userData,
                                unsigned int) {
  if (!is_stream(hStream)) return CUDA_ERROR_INVALID_HANDLE;
  if (callback == nullptr) return CUDA_ERROR_INVALID_VALUE;
  callback(hStream, CUDA_SUCCESS, userData);
  return CUDA_SUCCESS;
}

GPUPOOL_API cuEventCreate(CUevent* phEvent, unsigned int Flags) {
  if (current_context() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  if (phEvent == nullptr) return CUDA_ERROR_INVALID_VALUE;
  auto* event = new CUevent_st;
  event->flags = Flags;
  *phEvent = event;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuEventDestroy_v2(CUevent hEvent) {
  if (!is_valid(hEvent)) return CUDA_ERROR_INVALID_HANDLE;
  hEvent->magic = 0;
  delete hEvent;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuEventRecord(CUevent hEvent, CUstream hStream) {
  if (!is_valid(hEvent) || !is_stream(hStream)) return CUDA_ERROR_INVALID_HANDLE;
  hEvent->recorded = true;
  if ((hEvent->flags & CU_EVENT_DISABLE_TIMING) == 0) hEvent->nanoseconds = now();
  return CUDA_SUCCESS;
}

GPUPOOL_API cuEventRecordWithFlags(CUevent hEvent, CUstream hStream, unsigned int) {
  return cuEventRecord(hEvent, hStream);
}
GPUPOOL_API cuEventQuery(CUevent hEvent) {
  return is_valid(hEvent) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}
GPUPOOL_API cuEventSynchronize(CUevent hEvent) {
  return is_valid(hEvent) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

GPUPOOL_API cuEventElapsedTime_v2(float* pMilliseconds, CUevent hStart, CUevent hEnd) {
  if (pMilliseconds == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (!is_valid(hStart) || !is_valid(hEnd) || !hStart->recorded || !hEnd->recorded ||
      ((hStart->flags | hEnd->flags) & CU_EVENT_DISABLE_TIMING) != 0) {
    return CUDA_ERROR_INVALID_HANDLE;
  }
  *pMilliseconds =
      static_cast<float>(static_cast<double>(hEnd->nanoseconds - hStart->nanoseconds) * 1e-6);
  return CUDA_SUCCESS;
}

GPUPOOL_API cuLaunchKernel(CUfunction f, unsigned int gridDimX, unsigned int gridDimY,
                           unsigned int gridDimZ, unsigned int blockDimX, unsigned int blockDimY,
                           unsigned int blockDimZ, unsigned int, CUstream hStream, void**, void**) {
  return launch(f, gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, hStream);
}

GPUPOOL_API cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction f, void**, void**) {
  if (config == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return launch(f, config->gridDimX, config->gridDimY, config->gridDimZ, config->blockDimX,
                config->blockDimY, config->blockDimZ, config->hStream);
}

GPUPOOL_API cuLaunchCooperativeKernel(CUfunction f, unsigned int gridDimX, unsigned int gridDimY,
                                      unsigned int gridDimZ, unsigned int blockDimX,
                                      unsigned int blockDimY, unsigned int blockDimZ, unsigned int,
                                      CUstream hStream, void**) {
  return launch(f, gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, hStream);
}
