// Stream capture: what the entry points that submit work, wait, or may not be called while streams
// capture ask first. While nothing captures, one look at a counter answers.
#pragma once

#include <atomic>
#include <functional>

#include "graphs/graph.h"

namespace gpupool::graphs {

// Captures going on, and the same with the events that stand for captured work.
extern std::atomic<unsigned> captures_open, watched;
inline bool capturing() { return captures_open.load(std::memory_order_relaxed) != 0; }
inline bool watching() { return watched.load(std::memory_order_relaxed) != 0; }

// ---- With capturing(), for events with watching()
// ----------------------------------------------------------------------------

// Work for a stream. False: it is not captured, go on. True: *result is the call's answer.
// `describe` writes what the node does.
bool capture(CUstream stream, CUresult* result, const std::function<CUresult(Work*)>& describe);
bool capture_launch(CUstream stream, CUfunction function, const unsigned grid[3],
                    const unsigned block[3], unsigned shared_bytes,
                    const CUlaunchAttribute* attributes, unsigned attribute_count,
                    void** parameters, void** extra, CUresult* result);
bool capture_copy(CUstream stream, const CUDA_MEMCPY3D& copy, CUresult* result);
bool capture_copy(CUstream stream, CUmemorytype to_type, uint64_t to, CUmemorytype from_type,
                  uint64_t from, size_t bytes, CUresult* result);
bool capture_copy(CUstream stream, const CUDA_MEMCPY2D& copy, CUresult* result);
bool capture_fill(CUstream stream, CUdeviceptr address, size_t pitch, unsigned value,
                  unsigned element, size_t width, size_t height, CUresult* result);
bool capture_record(CUstream stream, CUevent event, unsigned flags, CUresult* result);
bool capture_wait(CUstream stream, CUevent event, unsigned flags, CUresult* result);
bool capture_host(CUstream stream, CUhostFn function, void* data, CUresult* result);
bool capture_allocation(CUstream stream, CUdevice device, size_t bytes, CUdeviceptr* address,
                        CUresult* result);
bool capture_free(CUstream stream, CUdeviceptr address, CUresult* result);
// What can't be captured: refused if the stream captures.
bool refuse_capture(CUstream stream, CUresult* result);

// A call that waits for, or asks about, a stream.
CUresult check_stream_query(CUstream stream);
// The same for an event; and an event's time.
CUresult check_event_query(CUevent event);
// Both events, as a function's only reason to look.
bool refuse_events(CUevent first, CUevent second, CUresult* result);
// A call that waits for the whole context: no stream of it may capture.
CUresult check_context_wait(CUcontext context);
// A call that may depend on other work without saying so: allocation, freeing, context creation.
CUresult check_unsafe();
// A copy or memset that uses the legacy default stream and waits for it.
CUresult check_synchronous();

void forget_stream(uint64_t key);
void forget_event(CUevent event);
void forget_context(CUcontext context);

}  // namespace gpupool::graphs

// For entry points: `return` what the graphs answer, if they do.
#define GPUPOOL_CAPTURE(call)                             \
  do {                                                    \
    if (::gpupool::graphs::capturing()) [[unlikely]] {    \
      CUresult capture_result = CUDA_SUCCESS;             \
      if (::gpupool::graphs::call) return capture_result; \
    }                                                     \
  } while (0)
// The same for calls with events, which outlive captures.
#define GPUPOOL_CAPTURE_EVENT(call)                       \
  do {                                                    \
    if (::gpupool::graphs::watching()) [[unlikely]] {     \
      CUresult capture_result = CUDA_SUCCESS;             \
      if (::gpupool::graphs::call) return capture_result; \
    }                                                     \
  } while (0)
#define GPUPOOL_CAPTURE_CHECK(call)                                           \
  do {                                                                        \
    if (::gpupool::graphs::capturing()) [[unlikely]] {                        \
      if (const CUresult refused_ = ::gpupool::graphs::call) return refused_; \
    }                                                                         \
  } while (0)
