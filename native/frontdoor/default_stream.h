// What the null stream means to the calling thread at the moment: the legacy default stream, or,
// inside a _ptds or _ptsz function, the thread's own default stream.
#pragma once

#include "api/cuda_abi.h"

namespace gpupool::frontdoor {

// One byte in the static TLS block: a library that is loaded late finds little room there.
extern __thread bool t_per_thread_stream
    __attribute__((tls_model("initial-exec"), visibility("hidden")));

// Alive while a per-thread twin runs its base function. Generated twins use it.
class PerThreadStream {
 public:
  PerThreadStream() : saved_(t_per_thread_stream) { t_per_thread_stream = true; }
  ~PerThreadStream() { t_per_thread_stream = saved_; }
  PerThreadStream(const PerThreadStream&) = delete;
  PerThreadStream& operator=(const PerThreadStream&) = delete;

 private:
  bool saved_;
};

// The stream that `stream` stands for: never null, CU_STREAM_LEGACY or CU_STREAM_PER_THREAD
// instead.
inline CUstream resolve_stream(CUstream stream) {
  if (stream != nullptr) return stream;
  return t_per_thread_stream ? CU_STREAM_PER_THREAD : CU_STREAM_LEGACY;
}

// The stream of a function that takes none (cuMemcpyHtoD and its like).
inline CUstream default_stream() { return resolve_stream(nullptr); }

}  // namespace gpupool::frontdoor
