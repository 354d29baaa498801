#define GPUPOOL_CUDA_ABI_EXACT 1
#include "worker/staging.h"

#include <sys/mman.h>

#include <algorithm>

namespace gpupool::worker {

void Staging::drop_spare(size_t most) {
  while (all_.size() > most && !free_.empty()) {
    StagingBuffer* buffer = free_.back();
    free_.pop_back();
    if (buffer->event != nullptr) driver_.cuEventDestroy_v2(buffer->event);
    if (buffer->owner == nullptr) {
      munmap(buffer->data, kBytes);
    } else if (driver_.cuMemFreeHost != nullptr) {
      driver_.cuMemFreeHost(buffer->data);
    }
    std::erase_if(all_, [buffer](const auto& it) { return it.get() == buffer; });
  }
}

StagingBuffer* Staging::acquire(CUcontext context, size_t most) {
  std::unique_lock guard(lock_);
  StagingBuffer* buffer = nullptr;
  for (;;) {
    // What is done: in order, so the first that is not ends the search.
    size_t done = 0;
    while (done < pending_.size() &&
           driver_.cuEventQuery(pending_[done]->event) != CUDA_ERROR_NOT_READY) {
      free_.push_back(pending_[done]);
      done++;
    }
    pending_.erase(pending_.begin(), pending_.begin() + static_cast<long>(done));
    if (all_.size() > most) drop_spare(most);
    if (!free_.empty()) {
      buffer = free_.back();  // the one whose memory is most likely in the cache
      free_.pop_back();
      break;
    }
    if (all_.size() < most) {
      auto fresh = std::make_unique<StagingBuffer>();
      void* data = nullptr;
      if (driver_.cuMemHostAlloc == nullptr ||
          driver_.cuMemHostAlloc(&data, kBytes, CU_MEMHOSTALLOC_PORTABLE) != CUDA_SUCCESS) {
        // Also memory that is not locked is right, only slower.
        data = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (data == MAP_FAILED) return nullptr;
      } else {
        fresh->owner = context;
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
  buffer->out = true;
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
  buffer->out = false;
  if (result == CUDA_SUCCESS) {
    pending_.push_back(buffer);
  } else {
    // Without the event nobody knows when: after everything.
    driver_.cuStreamSynchronize(stream);
    free_.push_back(buffer);
  }
  returned_.notify_all();
  return result;
}

void Staging::release(StagingBuffer* buffer) {
  std::lock_guard guard(lock_);
  buffer->out = false;
  free_.push_back(buffer);
  returned_.notify_all();
}

void Staging::forget_context(CUcontext context, bool broken) {
  std::unique_lock guard(lock_);
  auto concerned = [context](const StagingBuffer* buffer) {
    return buffer->context == context || buffer->owner == context;
  };
  // A waiter thread may still send what it has.
  returned_.wait(guard, [&] {
    return std::none_of(all_.begin(), all_.end(),
                        [&](const auto& buffer) { return buffer->out && concerned(buffer.get()); });
  });
  for (auto& buffer : all_) {
    if (!concerned(buffer.get())) continue;
    std::erase(pending_, buffer.get());
    std::erase(free_, buffer.get());
    if (buffer->event != nullptr && !broken) driver_.cuEventDestroy_v2(buffer->event);
    buffer->event = nullptr;
    buffer->context = nullptr;
    if (buffer->owner != context) {
      free_.push_back(buffer.get());
      continue;
    }
    if (!broken && driver_.cuMemFreeHost != nullptr) driver_.cuMemFreeHost(buffer->data);
    buffer->data = nullptr;
  }
  std::erase_if(all_, [](const auto& buffer) { return buffer->data == nullptr; });
}

Staging::~Staging() {
  for (auto& buffer : all_) {
    if (buffer->owner == nullptr) munmap(buffer->data, kBytes);
  }
}

}  // namespace gpupool::worker
