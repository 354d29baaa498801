#define GPUPOOL_CUDA_ABI_EXACT 1
#include "worker/staging.h"

#include <sys/mman.h>

#include <algorithm>

namespace gpupool::worker {

StagingBuffer* Staging::acquire(CUcontext context) {
  std::unique_lock guard(lock_);
  StagingBuffer* buffer = nullptr;
  for (;;) {
    // What is done: in order, so the first that is not ends the search.
    size_t done = 0;
    while (done < pending_.size() && driver_.cuEventQuery(pending_[done]->event) != CUDA_ERROR_NOT_READY) {
      pending_[done]->pending = false;
      free_.push_back(pending_[done]);
      done++;
    }
    pending_.erase(pending_.begin(), pending_.begin() + static_cast<long>(done));
    if (!free_.empty()) {
      buffer = free_.back();  // the one whose memory is most likely in the cache
      free_.pop_back();
      break;
    }
    if (all_.size() < kBuffers) {
      auto fresh = std::make_unique<StagingBuffer>();
      void* data = nullptr;
      if (driver_.cuMemHostAlloc == nullptr ||
          driver_.cuMemHostAlloc(&data, kBytes, CU_MEMHOSTALLOC_PORTABLE) != CUDA_SUCCESS) {
        // Also memory that is not locked is right, only slower.
        data = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (data == MAP_FAILED) return nullptr;
      }
      fresh->data = static_cast<uint8_t*>(data);
      buffer = fresh.get();
      all_.push_back(std::move(fresh));
      break;
    }
    if (!pending_.empty()) {
      driver_.cuEventSynchronize(pending_.front()->event);
      continue;
    }
    returned_.wait(guard);  // waiter threads have them all
  }
  out_++;
  if (buffer->event == nullptr || buffer->context != context) {
    if (buffer->event != nullptr) driver_.cuEventDestroy_v2(buffer->event);
    buffer->event = nullptr;
    buffer->context = context;
    if (driver_.cuEventCreate(&buffer->event, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS) {
      buffer->event = nullptr;
    }
  }
  return buffer;
}

CUresult Staging::record(StagingBuffer* buffer, CUstream stream) {
  return buffer->event == nullptr ? CUDA_ERROR_OUT_OF_MEMORY
                                  : driver_.cuEventRecord(buffer->event, stream);
}

CUresult Staging::release_after(StagingBuffer* buffer, CUstream stream) {
  CUresult result = record(buffer, stream);
  std::lock_guard guard(lock_);
  out_--;
  if (result == CUDA_SUCCESS) {
    buffer->pending = true;
    pending_.push_back(buffer);
  } else {
    // Without the event nobody knows when: after everything.
    driver_.cuStreamSynchronize(stream);
    free_.push_back(buffer);
  }
  returned_.notify_one();
  return result;
}

void Staging::release(StagingBuffer* buffer) {
  std::lock_guard guard(lock_);
  out_--;
  free_.push_back(buffer);
  returned_.notify_one();
}

void Staging::forget_context(CUcontext context) {
  std::lock_guard guard(lock_);
  for (auto& buffer : all_) {
    if (buffer->context != context) continue;
    if (buffer->pending) {
      buffer->pending = false;
      pending_.erase(std::find(pending_.begin(), pending_.end(), buffer.get()));
      free_.push_back(buffer.get());
    }
    buffer->event = nullptr;  // the context's end has destroyed it
    buffer->context = nullptr;
  }
}

}  // namespace gpupool::worker
