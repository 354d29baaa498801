#define GPUPOOL_CUDA_ABI_EXACT 1
#include "worker/lent_bulk.h"

namespace gpupool::worker {

bool LentBulk::usable(CUcontext context) {
  if (state_ == State::kUnknown) {
    state_ = State::kUnusable;
    carriers::Part pieces[2];
    const int count = carrier_.bulk_memory(pieces);
    if (count == 0 || driver_.cuMemHostRegister_v2 == nullptr ||
        driver_.cuMemHostUnregister == nullptr) {
      return false;
    }
    for (int i = 0; i < count; i++) {
      if (driver_.cuMemHostRegister_v2(pieces[i].data, pieces[i].bytes,
                                       CU_MEMHOSTREGISTER_PORTABLE) != CUDA_SUCCESS) {
        while (i-- > 0) driver_.cuMemHostUnregister(pieces[i].data);
        return false;
      }
    }
    owner_ = context;
    state_ = State::kLocked;
  }
  return state_ == State::kLocked;
}

void LentBulk::give_back_after(uint64_t end, uint64_t bytes, CUcontext context, CUstream stream) {
  if (context_ != context) {
    collect(0);
    for (CUevent event : spare_) driver_.cuEventDestroy_v2(event);
    spare_.clear();
    context_ = context;
  }
  CUevent event = nullptr;
  if (!spare_.empty()) {
    event = spare_.back();
    spare_.pop_back();
  } else if (driver_.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS) {
    event = nullptr;
  }
  if (event == nullptr || driver_.cuEventRecord(event, stream) != CUDA_SUCCESS) {
    driver_.cuStreamSynchronize(stream);  // nobody tells when: after everything
  }
  lent_.push_back({event, end, bytes});
  lent_bytes_ += bytes;
}

void LentBulk::give_back(size_t count) {
  if (count == 0) return;
  const uint64_t end = lent_[count - 1].end;
  for (size_t i = 0; i < count; i++) {
    lent_bytes_ -= lent_.front().bytes;
    if (lent_.front().event != nullptr) spare_.push_back(lent_.front().event);
    lent_.pop_front();
  }
  carrier_.release_bulk(end, lent_.empty());
}

void LentBulk::collect(uint64_t most) {
  size_t done = 0;
  uint64_t left = lent_bytes_;
  while (done < lent_.size()) {
    const CUevent event = lent_[done].event;
    if (event != nullptr) {
      if (left > most) {
        driver_.cuEventSynchronize(event);
      } else if (driver_.cuEventQuery(event) == CUDA_ERROR_NOT_READY) {
        break;
      }
    }
    left -= lent_[done].bytes;
    done++;
  }
  give_back(done);
}

void LentBulk::forget_context(CUcontext context, bool broken) {
  if (context != context_ && context != owner_) return;
  give_back(lent_.size());
  if (context == context_) {
    if (!broken) {
      for (CUevent event : spare_) driver_.cuEventDestroy_v2(event);
    }
    spare_.clear();
    context_ = nullptr;
  }
  if (context != owner_) return;
  carriers::Part pieces[2];
  const int count = carrier_.bulk_memory(pieces);
  for (int i = 0; i < count && !broken; i++) driver_.cuMemHostUnregister(pieces[i].data);
  owner_ = nullptr;
  state_ = broken ? State::kUnusable : State::kUnknown;
}

}  // namespace gpupool::worker
